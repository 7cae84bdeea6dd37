"""Optimizers that `torch.optim` does not have, and several as one.

All are ordinary `torch.optim.Optimizer`s, which also train eagerly. Their norms are roots of sums,
so that parts of a parameter need one number from one another, not their elements.
"""

from sbp_torch._torch_optim_compat import note_step, tell_steps
from sbp_torch.optim.combined import CombinedOptimizer, members
from sbp_torch.optim.lamb import Lamb
from sbp_torch.optim.lars import Lars
from sbp_torch.optim.lion import Lion
from sbp_torch.optim.schedule import TorchSchedule

__all__ = [
    "CombinedOptimizer",
    "Lamb",
    "Lars",
    "Lion",
    "TorchSchedule",
    "members",
    "note_step",
    "tell_steps",
]
