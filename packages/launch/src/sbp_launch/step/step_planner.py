"""Plan a captured step: call the planner, offer it variants, find micro-batches that fit.

a planner that chooses variants      is called once, with all variants of the step
any other, micro_batches="auto"      is called for 1, 2, ... micro-batches until its plan fits
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
    """The planner of a step, and the decisions that it must keep or may take.

    Args:
        planner: A planner; or a strategy, which leaves nothing to decide.
        pins: Pins of the user, which the planner must keep.
        chooses_micro_batches: Whether the number of micro-batches is chosen, too.
        files: The config files of the model, its data and the planner, for messages.
        planner_file: The config file of the planner, for messages.
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
        """Return the strategy for a graph.

        Args:
            graph: The step, or one of its variants.
            settings: Settings of planning.
            more: Further pins; pins of the user replace them.
            family: The variants of the step, if the planner may choose among them.
            kept: A store in which the planner may keep the plans that it compiles.

        Raises:
            ConfigError: the planner refuses the request; or both a strategy and pins are given.
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
    """Plans a captured step, also repeatedly with different pins.

    Args:
        choice: The planner, pins and further choices.
        capture: Captures the step again.
        captured: The captured step.
        family: The variants of the step that a planner may choose.
        settings: Settings of planning.
        stage: Reports what is done.
        say: Prints lines.
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

        The plan is not checked against the memory, unless the number of micro-batches is to be
        chosen and the planner does not choose it.

        Args:
            pins: Pins in addition to those of the choice; a planner that only reads its plans
                ignores them.

        Raises:
            MemoryLimitError: no number of micro-batches makes the step fit its memory.
            SbpError: the planner raised it.
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

        Fewer and larger micro-batches keep the ranks busier. If they need small buckets to fit, the
        next numbers are compared, up to one that needs none. A pipeline is an exception: it needs
        more of them than the memory requires, so the user sets their number.
        """
        problem: MemoryLimitError | None = None
        best: Planned | None = None
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
            if best is None or found.simulation.step_s < best.simulation.step_s:
                best = found
            # Small buckets make it fit, but more micro-batches may be faster.
            if found.strategy.bucket_bytes is None:
                break
        if best is not None:
            count = best.settings.micro_batches
            self.say([f"micro_batches=auto: {count}, of {self._each(best.settings)}"])
            return best
        assert problem is not None, "every batch has a divisor"
        raise problem.replaced(
            MemoryLimitError,
            what=f"trainer.micro_batches=auto: not even {self.family.micro_batches[-1]} "
            f"micro-batches make the step fit: {problem.what}",
            # Higher numbers of micro-batches were tried already.
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
        """Return the captured step for the settings that the planner has chosen.

        Args:
            settings: The settings of a plan that `plan` returned.
        """
        size = self.family.batch_size // settings.captured_parts
        captured = self.captured
        return replace(captured, original=self.family.captured(size), settings=settings)

    def check_fits(self, planned: Planned) -> None:
        """Check that a plan fits the memory of its ranks.

        Raises:
            ConfigError: it does not fit.
        """
        with self.stage("checking its memory"):
            check_fits(planned, planned.settings.cluster)

    def add_proof(self, planned: Planned, batch: Any) -> Planned:
        """Return a plan together with the result of its proof.

        Args:
            planned: A plan that `plan` returned.
            batch: An example of the batch that a process gives.

        Raises:
            GraphError: the planned step and the captured one compute different results.
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
    """Capture the step of a program, and return its `StepPlanner`.

    Args:
        capture: Captures it.
        batch: An example of the batch that a process gives in one step.
        choice: The planner, pins and further choices.
        following: Checks that the capture changes nothing that the program reads.
        look: Gets the captured graph before it is cut into micro-batches; may refuse it.
        stage: Reports what is done.
        say: Prints lines.

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
