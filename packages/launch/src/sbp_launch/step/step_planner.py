"""Plans a captured step: who decides, which variants there are, and how many micro-batches fit.

planner that chooses variants       is asked once, with all variants of the step
any other, micro_batches="auto"     is asked for 1, 2, ... micro-batches until its plan fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from sbp_core.collection import collection_paused
from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError, MemoryLimitError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue
from sbp_core.memory import KeptPlans
from sbp_core.planning import Planner
from sbp_core.strategy import Strategy
from sbp_core.units import format_count
from sbp_launch.planning.family import StepFamily
from sbp_launch.planning.flow import (
    Captured,
    Planned,
    PlanSettings,
    check_fits,
    compiled,
    regathering,
)
from sbp_launch.step.engine import Stage, quietly
from sbp_launch.step.following import Following
from sbp_launch.step.step_capture import StepCapture

#: How tensors are pinned: a pattern of names -> SBP, or SBP by mesh axis.
Pins = Mapping[str, PinValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """Who decides how a step is split, and what is left to decide.

    Args:
        planner: Decides; or what was decided.
        pins: Of the user, over what the planner says.
        chooses_micro_batches: Whether it also chooses how many micro-batches a step has.
        files: Of the config that says what the model, its data and the planner are, for messages.
        planner_file: Likewise, of the planner alone.
    """

    planner: Planner | Strategy
    pins: Pins = field(default_factory=dict)
    chooses_micro_batches: bool = False
    files: tuple[str, ...] = ()
    planner_file: str = ""

    @property
    def chooses_variants(self) -> bool:
        """Whether the planner chooses among the variants of a step by itself."""
        return bool(getattr(self.planner, "chooses_variants", False))

    def strategy(
        self,
        graph: LogicalGraph,
        settings: PlanSettings,
        more: Pins | None = None,
        *,
        family: StepFamily | None = None,
        kept: KeptPlans | None = None,
    ) -> Strategy:
        """Return how a graph is split.

        Args:
            graph: The step, or one of its variants.
            settings: How it is planned.
            more: Pins below those of the user.
            family: The variants of the step, if the planner may choose among them.
            kept: Where the planner may leave the plans that it compiles.

        Raises:
            ConfigError: the planner refuses something; or a strategy was given, and pins with it.
        """
        pins = {**(more or {}), **self.pins}
        if isinstance(self.planner, Strategy):
            if pins:
                raise ConfigError(
                    "pins are given with a strategy, which has decided on everything",
                    where="the argument pins",
                    todo="leave out pins, or choose a planner",
                )
            check_strategy(graph, self.planner)
            return self.planner
        request = replace(settings.request(graph, pins), family=family)
        if kept is not None:
            request = replace(request, kept=kept)
        try:
            return regathering(self.planner.plan(request), settings.compile)
        except ConfigError as error:
            file = self.planner_file
            if not file or file in error.where:
                raise
            raise error.replaced(type(error), where=(*error.where, file)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanner:
    """Plans a captured step, once or again with other pins.

    Args:
        choice: Who decides.
        capture: Captures the step anew.
        captured: The step.
        family: The variants of the step that a planner may choose.
        settings: How it is planned.
        stage: Tells what is done.
        say: Tells people lines.
    """

    choice: PlanChoice
    capture: StepCapture
    captured: Captured
    family: StepFamily
    settings: PlanSettings
    stage: Stage = quietly
    say: Callable[[Iterable[str]], None] = lambda lines: None

    @collection_paused()
    def plan(self, pins: Pins | None = None) -> Planned:
        """Plan, compile and check the step.

        Whether it fits its memory is not checked, but where the number of micro-batches is to be
        chosen and the planner does not choose it.

        Args:
            pins: What must hold beyond what the choice says; a planner that only reads its plans
                heeds none.

        Raises:
            MemoryLimitError: no number of micro-batches makes the step fit its memory.
            SbpError: of the planner.
        """
        choice = self.choice
        if not choice.chooses_micro_batches:
            return self._plan(self.captured, self.settings, pins)
        if choice.chooses_variants:
            found = self._plan(self.captured, self.settings, pins)
            each = self._each(found.settings)
            count = found.settings.micro_batches
            self.say([f"micro_batches=auto: the planner has chosen {count}, of {each}"])
            return found
        return self._fewest_micro_batches(pins)

    def _fewest_micro_batches(self, pins: Pins | None) -> Planned:
        """Return the plan with the fewest micro-batches that fits.

        Fewer and larger micro-batches keep the ranks busier. A pipeline wants more of them than
        memory asks for, and is told the number.
        """
        problem: MemoryLimitError | None = None
        for count in self.family.micro_batches:
            settings = replace(self.settings, micro_batches=count)
            try:
                size = self.family.batch_size // settings.captured_parts
                captured = Captured.of(self.family.captured(size), settings)
                found = self._plan(captured, settings, pins)
                self.check_fits(found)
            except MemoryLimitError as error:
                problem = error
                batches = format_count(count, "micro-batch", "es")
                self.say([f"micro_batches=auto: {batches} would not fit: {error.what}"])
                continue
            self.say([f"micro_batches=auto: {count}, of {self._each(settings)}"])
            return found
        assert problem is not None, "every batch has a divisor"
        raise problem.replaced(
            MemoryLimitError,
            what=f"trainer.micro_batches=auto: not even {self.family.micro_batches[-1]} "
            f"micro-batches make the step fit: {problem.what}",
            # That has been tried.
            todo=problem.todo.replace("set trainer.micro_batches, ", ""),
        ) from problem

    def _each(self, settings: PlanSettings) -> str:
        return format_count(self.family.batch_size // settings.micro_batches, "sample")

    def _plan(self, captured: Captured, settings: PlanSettings, pins: Pins | None) -> Planned:
        choice, kept = self.choice, KeptPlans()

        def plan(graph: LogicalGraph) -> Strategy:
            family = self.family if graph is self.captured.graph else None
            return choice.strategy(graph, settings, pins, family=family, kept=kept)

        with self.stage("planning"):
            graph, strategy = captured.planned(plan)
            if strategy.variant is not None:
                settings = self.family.settings_of(strategy.variant)
                graph = self.family.graph(strategy.variant)
        with self.stage("compiling and checking the plan"):
            return compiled(graph, strategy, settings, kept)

    def captured_as(self, settings: PlanSettings) -> Captured:
        """Return the captured step as the settings that the planner has chosen say.

        Args:
            settings: Of a plan that `plan` returned.
        """
        size = self.family.batch_size // settings.captured_parts
        captured = self.captured
        return replace(captured, original=self.family.captured(size), settings=settings)

    def check_fits(self, planned: Planned) -> None:
        """Check that a plan fits the memory of its ranks.

        Raises:
            ConfigError: it does not.
        """
        with self.stage("checking its memory"):
            check_fits(planned, planned.settings.cluster)

    def add_proof(self, planned: Planned, batch: Any) -> Planned:
        """Return a plan with what is proved of it.

        Args:
            planned: That `plan` returned.
            batch: An example of what a process gives.

        Raises:
            GraphError: the planned step computes something else than the captured one.
        """
        settings = planned.settings
        capture = replace(self.capture, settings=settings)
        with self.stage("proving the step") if settings.compile.prove else nullcontext():
            return capture.add_proof(planned, self.captured_as(settings).original, batch)


@collection_paused(plans=True)
def step_planner(
    capture: StepCapture,
    batch: Any,
    choice: PlanChoice,
    following: Following,
    *,
    look: Callable[[LogicalGraph], None] = lambda graph: None,
    stage: Stage = quietly,
    say: Callable[[Iterable[str]], None] = lambda lines: None,
) -> StepPlanner:
    """Capture the step of a program, and return what plans it.

    Args:
        capture: Captures it.
        batch: An example of what a process gives in one step.
        choice: Who decides how it is split.
        following: Of the program; sees that capturing it changes nothing that it reads.
        look: Is given what was captured, before it is cut into micro-batches; may refuse it.
        stage: Tells what is done.
        say: Tells people lines.

    Raises:
        SbpError: the step cannot be captured, or changes what it reads.
    """
    settings = capture.settings
    with stage("capturing the step"):
        original = capture(batch)
        look(original)
        following.note_capture(original, partial(capture, batch))
        captured = capture.prepare(original)
    batch_size = capture.num_samples(batch)
    whole = batch_size // settings.captured_parts

    @cache
    def on_samples(size: int) -> LogicalGraph:
        return original if size == whole else capture.with_num_samples(batch, size)

    family = StepFamily(
        settings=settings,
        captured=on_samples,
        batch_size=batch_size,
        chooses_micro_batches=choice.chooses_micro_batches,
        known=captured.graph,
    )
    return StepPlanner(
        choice=choice,
        capture=capture,
        captured=captured,
        family=family,
        settings=settings,
        stage=stage,
        say=say,
    )
