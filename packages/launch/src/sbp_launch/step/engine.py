"""`Engine`: holds all that is needed to run a plan: runtime, boxing backend, and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import BatchIs, Runtime, Session, StepResult
from sbp_launch.planning.flow import PlanSettings
from sbp_launch.world import World

#: Reports what the body of a `with` block does.
Stage = Callable[[str], AbstractContextManager[None]]


def quietly(what: str) -> AbstractContextManager[None]:
    """Report nothing."""
    return nullcontext()


def _plainly(session: Session, take: Callable[[], StepResult]) -> StepResult:
    return take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The means to start the sessions of a training step: for training, and for evaluation.

    Args:
        settings: Settings of planning.
        runtime: The runtime that starts plans.
        make_backend: Returns a boxing backend that is not yet open.
        world: This process among all.
        registry: The plugins.
        seed: The seed of random numbers in the step, such as those of dropout.
        batch_is: The batch that a process gives: `global`, the whole batch; `local`, its own part.
        measuring: Takes a step of a session by calling its second argument; may measure it.
        cuts_batches: Whether a process gives only the tensors of a batch that its ranks read. In a
            pipeline, for example, the first stage gives the inputs and the last one the targets.
        holds_interrupts: Whether Ctrl-C waits until a step is complete; if not, the caller handles
            it.
        elsewhere: How to save to another folder, for messages.
        stage: Reports what is done while a step is planned.
        say: Prints lines.
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
        """Whether a process gives only a part of the batch; a single process gives all of it."""
        return self.batch_is == "local" and self.world.size > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        mesh = self.settings.mesh
        return mesh.rank_list if self.world.size == 1 else (self.world.rank,)
