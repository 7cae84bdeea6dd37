"""Plugin hooks of sbp-boxing-nccl: register the boxing (resharding) backends `mpi` and `nccl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_boxing_nccl.configs import MpiBoxingConfig, NcclBoxingConfig
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2


@hookimpl
def sbp_boxing_backends() -> Mapping[str, Factory]:
    """Register the backends over MPI and over NCCL."""
    return {
        "mpi": Factory(
            build="sbp_boxing_nccl.mpi.mpi_backend:MpiBackend",
            config=MpiBoxingConfig,
            summary="one process a rank, over MPI through mpi4py",
        ),
        "nccl": Factory(
            build="sbp_boxing_nccl.nccl.nccl_backend:NcclBackend",
            config=NcclBoxingConfig,
            summary="one process and one GPU a rank, over NCCL through CuPy",
        ),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Contribute the Hydra options `boxing=mpi` and `boxing=nccl`."""
    return ["pkg://sbp_boxing_nccl.conf"]
