"""Register the plugins of sbp-torch: in-process boxing (communication), a runtime, and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
from sbp_torch.runtime.configs import ReferenceConfig

SBP_API_VERSION = 2


@hookimpl
def sbp_boxing_backends() -> Mapping[str, Factory]:
    """Offer the in-process backend."""
    return {
        "local": Factory(
            build="sbp_torch.boxing.local:build",
            summary="all ranks in one process, one thread each",
        )
    }


@hookimpl
def sbp_runtimes() -> Mapping[str, Factory]:
    """Offer the reference runtime."""
    return {
        "reference": Factory(
            build="sbp_torch.runtime.reference:ReferenceRuntime",
            config=ReferenceConfig,
            summary="all ranks in lock-step in one thread",
        )
    }


@hookimpl
def sbp_tensor_libraries() -> Mapping[str, Factory]:
    """Offer PyTorch."""
    return {"torch": Factory(build="sbp_torch.tensor_library:build", summary="PyTorch")}


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Offer the folder of Hydra options for these plugins."""
    return ["pkg://sbp_torch.conf"]
