"""The actor runtime: threads for each rank, registers with credits, and a fixed firing order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_actor_runtime.configs import ActorConfig
    from sbp_actor_runtime.runtime import ActorRuntime

__all__ = ["ActorConfig", "ActorRuntime"]

__getattr__, __dir__ = lazy_room(__name__, configs="ActorConfig", runtime="ActorRuntime")
