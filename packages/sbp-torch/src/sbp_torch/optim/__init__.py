"""Optimizers that `torch.optim` lacks: LAMB, LARS, Lion, row-wise Adagrad, and combinations.

All are ordinary `torch.optim.Optimizer`s, which also work in eager PyTorch. Norms are roots of
sums, so the shards of a parameter exchange one number, not their elements. `TorchSchedule` converts
PyTorch's learning rate schedulers.
"""

from sbp_torch._torch_optim_compat import note_step, tell_steps
from sbp_torch.optim.combined import CombinedOptimizer, members
from sbp_torch.optim.lamb import Lamb
from sbp_torch.optim.lars import Lars
from sbp_torch.optim.lion import Lion
from sbp_torch.optim.row_wise_adagrad import RowWiseAdagrad
from sbp_torch.optim.schedule import TorchSchedule

__all__ = [
    "CombinedOptimizer",
    "Lamb",
    "Lars",
    "Lion",
    "RowWiseAdagrad",
    "TorchSchedule",
    "members",
    "note_step",
    "tell_steps",
]
