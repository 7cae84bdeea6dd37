"""Boxing over MPI (`mpi`) and over NCCL (`nccl`): two backends, with their settings in `configs`.

What all backends of several processes share is in `sbp_core.processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
    from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
    from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend

__all__ = ["MpiBackend", "MpiBoxingConfig", "NcclBackend", "NcclBoxingConfig"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "MpiBackend": "mpi.mpi_backend",
        "MpiBoxingConfig": "configs",
        "NcclBackend": "nccl.nccl_backend",
        "NcclBoxingConfig": "configs",
    },
)
