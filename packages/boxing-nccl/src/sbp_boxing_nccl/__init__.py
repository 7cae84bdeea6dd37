"""sbp boxing over MPI; and, in `nccl`, over NCCL.

Read the modules in this order: `configs` (settings), `mpi_library` (finding mpi4py),
`control_store` (what ranks tell each other), `direct_collectives` (collectives made of messages;
`reduce`, `wire`), `group` (what one set of ranks does, and how to wait for it), `outbox` (messages
on their way), `connections` (all groups, and how they break), `communicator` (one step), `exit`
(how a process leaves), `backend`.
What all backends of several processes share is in `sbp_core.boxing`.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_boxing_nccl.backend import MpiBackend
    from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
    from sbp_boxing_nccl.nccl.backend import NcclBackend

__all__ = ["MpiBackend", "MpiBoxingConfig", "NcclBackend", "NcclBoxingConfig"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "MpiBackend": "backend",
        "MpiBoxingConfig": "configs",
        "NcclBackend": "nccl.backend",
        "NcclBoxingConfig": "configs",
    },
)
