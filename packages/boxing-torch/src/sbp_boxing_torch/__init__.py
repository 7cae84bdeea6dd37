"""The boxing backend `torch`, over torch.distributed: gloo on CPUs, NCCL on GPUs.

Boxing changes how a tensor is distributed. Read the modules in this order: `configs` (settings),
`rendezvous` (rank of the process, and the shared store), `group` (collectives and messages of one
set of ranks), `connections` (all groups, messages in flight, and failures), `communicator` (the
boxing steps of one rank), `backend`. The code shared by all backends of several processes is in
`sbp_core.processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_boxing_torch.backend import TorchBackend
    from sbp_boxing_torch.configs import TorchBoxingConfig
    from sbp_boxing_torch.rendezvous import TorchWorld

__all__ = ["TorchBackend", "TorchBoxingConfig", "TorchWorld"]

__getattr__, __dir__ = lazy_room(
    __name__, backend="TorchBackend", configs="TorchBoxingConfig", rendezvous="TorchWorld"
)
