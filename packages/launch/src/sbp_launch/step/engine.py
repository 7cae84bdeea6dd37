"""What starts plans: a runtime, boxing backends, and this process among all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import BatchIs, Runtime, Session, StepResult
from sbp_launch.planning.flow import PlanSettings
from sbp_launch.world import World

#: Tells what is done in a `with` block.
Stage = Callable[[str], AbstractContextManager[None]]


def quietly(what: str) -> AbstractContextManager[None]:
    """Tell nothing."""
    return nullcontext()


def _plainly(session: Session, take: Callable[[], StepResult]) -> StepResult:
    return take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Starts the sessions of one training step: that of training, and those of evaluation.

    Args:
        settings: How steps are planned.
        runtime: Starts plans.
        make_backend: Returns a boxing backend that is not yet open.
        world: This process among all.
        registry: The plugins.
        seed: Of random numbers in the step, such as those of dropout.
        batch_is: What a process gives in a step: `global`, the whole batch; `local`, its own part.
        measuring: Takes a step of a session by calling what it is given; may measure it.
        cuts_batches: Whether a process gives only what its ranks take of a batch, such as the first
            stage of a pipeline the inputs, and the last one the targets.
        holds_interrupts: Whether Ctrl-C waits until a step is complete; if not, somebody else
            hears it.
        elsewhere: How one saves to another place, for messages.
        stage: Tells what is done while a step is planned.
        say: Tells people lines.
    """

    settings: PlanSettings
    runtime: Runtime
    make_backend: Callable[[], BoxingBackend]
    world: World
    registry: PluginRegistry
    seed: int
    batch_is: BatchIs
    measuring: Callable[[Session, Callable[[], StepResult]], StepResult] = _plainly
    cuts_batches: bool = False
    holds_interrupts: bool = True
    elsewhere: str = "save to another folder: step.save(FOLDER)"
    stage: Stage = quietly
    say: Callable[[Iterable[str]], None] = lambda lines: None

    @property
    def gives_parts(self) -> bool:
        """Whether a process gives less than the batch of a step: one that is alone gives it all."""
        return self.batch_is == "local" and self.world.size > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        mesh = self.settings.mesh
        return mesh.rank_list if self.world.size == 1 else (self.world.rank,)
