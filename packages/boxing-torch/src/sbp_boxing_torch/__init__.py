"""sbp boxing over torch.distributed: gloo on CPUs, NCCL on GPUs.

Read the modules in this order: `configs` (settings), `rendezvous` (which rank this is, and the
store that all reach), `group` (collectives and messages of one set of ranks), `connections` (all
groups, messages on their way, and how it all breaks), `communicator` (one step), `backend`. What
all backends of several processes share is in `sbp_core.processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_boxing_torch.backend import TorchBackend
    from sbp_boxing_torch.configs import TorchBoxingConfig
    from sbp_boxing_torch.rendezvous import TorchWorld

__all__ = ["TorchBackend", "TorchBoxingConfig", "TorchWorld"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "TorchBackend": "backend",
        "TorchBoxingConfig": "configs",
        "TorchWorld": "rendezvous",
    },
)
