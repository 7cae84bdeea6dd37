"""Plugin hooks of sbp-boxing-torch: register the boxing (resharding) backend `torch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2


@hookimpl
def sbp_boxing_backends() -> Mapping[str, Factory]:
    """Register the backend over torch.distributed."""
    return {
        "torch": Factory(
            build="sbp_boxing_torch.backend:TorchBackend",
            config=TorchBoxingConfig,
            summary="one process a rank, over torch.distributed (gloo on CPUs, nccl on GPUs)",
        )
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Contribute the Hydra option `boxing=torch`."""
    return ["pkg://sbp_boxing_torch.conf"]
