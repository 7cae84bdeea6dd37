"""sbp boxing over MPI (`mpi`), and over NCCL (`nccl`): two backends, whose settings are `configs`.

What all backends of several processes share is in `sbp_core.processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
    from sbp_boxing_nccl.mpi.backend import MpiBackend
    from sbp_boxing_nccl.nccl.backend import NcclBackend

__all__ = ["MpiBackend", "MpiBoxingConfig", "NcclBackend", "NcclBoxingConfig"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "MpiBackend": "mpi.backend",
        "MpiBoxingConfig": "configs",
        "NcclBackend": "nccl.backend",
        "NcclBoxingConfig": "configs",
    },
)
