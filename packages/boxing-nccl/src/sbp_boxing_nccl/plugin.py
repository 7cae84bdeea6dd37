"""The hooks of sbp-boxing-nccl: one boxing backend. Imports neither torch nor mpi4py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_core.plugins.hooks import Factory, hookimpl

SBP_API_VERSION = 1


@hookimpl
def sbp_boxing_backends() -> Mapping[str, Factory]:
    """Offer the backend over MPI."""
    return {
        "mpi": Factory(
            build="sbp_boxing_nccl.backend:build",
            config=MpiBoxingConfig,
            summary="one process a rank, over MPI through mpi4py",
        )
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Offer the Hydra option of the above."""
    return ["pkg://sbp_boxing_nccl.conf"]
