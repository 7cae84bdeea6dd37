"""Boxing backends over MPI (`mpi`) and NCCL (`nccl`); boxing changes how a tensor is distributed.

Their settings are in `configs`. The code shared by all backends of several processes is in
`sbp_core.processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
    from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
    from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend

__all__ = ["MpiBackend", "MpiBoxingConfig", "NcclBackend", "NcclBoxingConfig"]

__getattr__, __dir__ = lazy_room(
    __name__,
    configs="MpiBoxingConfig NcclBoxingConfig",
    **{"mpi.mpi_backend": "MpiBackend", "nccl.nccl_backend": "NcclBackend"},
)
