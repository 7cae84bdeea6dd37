"""What starts plans: a runtime, boxing backends, and this process' place among the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import BatchIs, Runtime
from sbp_launch.planning.flow import PlanSettings
from sbp_launch.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Starts the sessions of one parallel step: that of training, and those of evaluation.

    Args:
        settings: How steps are planned.
        runtime: Starts plans.
        make_backend: Returns a boxing backend that is not yet open.
        world: This process among all.
        registry: The plugins.
        seed: Of random numbers in the step, such as those of dropout.
        batch_is: What a process gives in a step: `global`, the whole batch; `local`, its own part.
    """

    settings: PlanSettings
    runtime: Runtime
    make_backend: Callable[[], BoxingBackend]
    world: World
    registry: PluginRegistry
    seed: int
    batch_is: BatchIs

    @property
    def gives_parts(self) -> bool:
        """Whether a process gives less than the batch of a step: one that is alone gives it all."""
        return self.batch_is == "local" and self.world.size > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        mesh = self.settings.mesh
        return mesh.rank_list if self.world.size == 1 else (self.world.rank,)
