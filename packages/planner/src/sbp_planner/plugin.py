"""The hooks of sbp-planner: which planners it brings.

Holds names and configs only; the planners are made in their modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
from sbp_planner.configs import FileConfig, InferConfig, ManualConfig, OsdpConfig

SBP_API_VERSION = 2


@hookimpl
def sbp_planners() -> Mapping[str, Factory]:
    """Return the planners of this package."""
    return {
        "infer": Factory(
            build="sbp_planner.infer:build",
            config=InferConfig,
            summary="any model on any mesh: the batch is split, the rest inferred; the default",
        ),
        "manual": Factory(
            build="sbp_planner.manual:build",
            config=ManualConfig,
            summary="a few pinned tensors, the rest inferred at least cost",
        ),
        "file": Factory(
            build="sbp_planner.file:build",
            config=FileConfig,
            summary="a strategy from a file that a run left, edited or not",
        ),
        "osdp": Factory(
            build="sbp_planner.osdp:build",
            config=OsdpConfig,
            summary="each parameter replicated or sharded, under a memory limit, exactly",
        ),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the Hydra search paths of this package."""
    return ["pkg://sbp_planner.conf"]
