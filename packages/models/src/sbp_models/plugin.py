"""The hooks of sbp-models: which models and data sets it brings.

Holds names and configs only, and imports nothing heavy; the objects are made in `gpt` and `text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
from sbp_models.configs import GptConfig, StdlibConfig, TextConfig

SBP_API_VERSION = 1


@hookimpl
def sbp_models() -> Mapping[str, Factory]:
    """Return the models of this package."""
    return {
        "gpt": Factory(
            build="sbp_models.gpt:build",
            config=GptConfig,
            summary="decoder-only transformer, pre-norm, learned positions",
        )
    }


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    """Return the data sets of this package."""
    return {
        "stdlib": Factory(
            build="sbp_models.text:build_stdlib",
            config=StdlibConfig,
            summary="bytes of the running Python's own standard library",
        ),
        "text": Factory(
            build="sbp_models.text:build_text",
            config=TextConfig,
            summary="bytes of a file or folder of yours",
        ),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the Hydra search paths of this package."""
    return ["pkg://sbp_models.conf"]
