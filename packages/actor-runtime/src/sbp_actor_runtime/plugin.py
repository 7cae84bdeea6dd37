"""Plugin hooks of sbp-actor-runtime: register the runtime `actor`, which runs plans on threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_actor_runtime.configs import ActorConfig
from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2


@hookimpl
def sbp_runtimes() -> Mapping[str, Factory]:
    """Register the actor runtime."""
    return {
        "actor": Factory(
            build="sbp_actor_runtime.runtime:ActorRuntime",
            config=ActorConfig,
            summary="registers, credits and static order; one set of threads a rank",
        )
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Contribute `runtime=actor`."""
    return ["pkg://sbp_actor_runtime.conf"]
