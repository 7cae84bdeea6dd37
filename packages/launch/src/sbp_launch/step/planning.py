"""From a program to a checked and proved plan of its step.

    program ── capture ──> Captured ── StepPlanner.plan ──> Planned ── proof ──> PlannedProgram
                  │                        │
                  │                        └ asks the planner; a planner that does not choose
                  │                          micro-batches is asked for each number of them
                  └ a guard sees that this changes nothing that the program reads

`parallelize` makes a `PlanChoice` of its arguments, and `sbp-train` of its config.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import gcd, prod
from typing import Any

import torch

from sbp_core.collection import collection_paused
from sbp_core.compile import check_strategy
from sbp_core.errors import CaptureError, ConfigError, PlanError, SbpError
from sbp_core.graph import InputKind, LogicalGraph, Node
from sbp_core.infer import PinValue
from sbp_core.memory import KeptPlans
from sbp_core.planning import Planner
from sbp_core.strategy import Strategy
from sbp_launch.planning.beside import PlanAround, plan_form
from sbp_launch.planning.family import StepFamily
from sbp_launch.planning.flow import (
    Captured,
    Planned,
    PlanSettings,
    capture_step,
    check_fits,
    compiled,
    regathering,
)
from sbp_launch.planning.proving import proved
from sbp_launch.planning.report import counted
from sbp_launch.step.engine import Engine, Stage, quietly
from sbp_launch.step.following import Following
from sbp_launch.step.numbers import Places
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.time_steps import (
    num_cuts,
    refuse_cut_time,
    tell_cut_time,
    time_in_front,
)
from sbp_launch.step.training import Training
from sbp_torch.capture import NO_NUMBERS, flatten_batch, rebuild_batch

#: How tensors are pinned: a pattern of names -> SBP, or SBP by mesh axis.
Pins = Mapping[str, PinValue]

#: Axes along which ranks do not split a batch, unless their planner says so.
_SHARING = ("pipe", "tensor")

_PIN_BATCH = "pin it: pins={'batch': {'data': 'S(0)', '*': 'B'}}"


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
        request = replace(settings.request(graph, pins), family=family, kept=kept)
        try:
            return regathering(self.planner.plan(request), settings.compile)
        except ConfigError as error:
            file = self.planner_file
            if not file or file in error.where:
                raise
            raise error.replaced(ConfigError, where=(*error.where, file)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """Captures the step of a program, and proves what was planned of it.

    Args:
        program: Whose step.
        degree: Of how many parts of processes a batch consists.
        settings: How it is captured.
        whole: An example of the batch of all processes, if it is known: then what a process gives
            says nothing more.
        files: Of the config that says what the model and its data are, for messages.
    """

    program: OneDeviceProgram
    degree: int
    settings: PlanSettings
    whole: Any = None
    files: tuple[str, ...] = ()

    def __call__(self, batch: Any, numbers: Places = NO_NUMBERS, /) -> LogicalGraph:
        """Return the step of a batch of one process, as it is captured of the program now.

        Args:
            batch: An example.
            numbers: Of Python, that are inputs of the step.

        Raises:
            CaptureError: it cannot be captured.
            ConfigError: the model asks its batch for what the data do not give.
        """
        return self._captured(batch, self._example(batch), numbers)

    def sized(self, batch: Any, size: int) -> LogicalGraph:
        """Return the step as it is captured on another number of samples.

        Args:
            batch: An example of what a process gives.
            size: Samples of what is captured, of all processes together.

        Raises:
            SbpError: see `__call__`.
        """
        return self._captured(batch, _resized(self._everyone(batch), size), NO_NUMBERS)

    def num_samples(self, batch: Any) -> int:
        """Return how many samples the batch of a step has, of all processes together."""
        return _num_samples(self._everyone(batch))

    def _captured(self, batch: Any, example: Any, numbers: Places) -> LogicalGraph:
        program = self.program
        given = program.model, program.loss_of_step, example, program.optimizer
        try:
            return capture_step(*given, self.settings, numbers)
        except CaptureError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__
            if cause is not None and self.files:
                where = (*cause.where, *self.files)
                raise cause.replaced(ConfigError, where=where) from error
            told = self._told_samples(batch)
            if not told or numbers:
                raise
            todo = f"{error.todo}; {told}" if error.todo else told
            raise error.replaced(CaptureError, todo=todo) from error

    def _told_samples(self, batch: Any) -> str:
        """Say of how many samples a step is captured, if others are given than that."""
        given, taken = (
            next((len(one) for one in flatten_batch(made).values() if one.dim()), 0)
            for made in (batch, self._example(batch))
        )
        if given == taken or self.whole is not None:
            return ""
        whose = f"of {self.degree} processes" if self.degree > 1 else "of one micro-batch"
        return (
            f"the step is captured with the {taken} samples {whose}, where the batch has {given}: "
            f"a buffer with a row for each sample needs {taken} rows"
        )

    def prepared(self, graph: LogicalGraph, numbers: Places = NO_NUMBERS) -> Captured:
        """Return what was captured in the forms that are planned.

        Args:
            graph: As it was captured.
            numbers: That may be inputs of it.

        Raises:
            SbpError: it cannot be brought into them.
        """
        return Captured.of(graph, self.settings, numbers)

    def _everyone(self, batch: Any) -> Any:
        """Return an example of the batch of all processes."""
        if self.whole is not None:
            return self.whole
        return captured_batch(batch, self.settings.micro_batches, self.degree, 1)

    def _example(self, batch: Any) -> Any:
        """Return an example of what is captured."""
        settings, given = self.settings, batch if self.whole is None else self.whole
        degree = self.degree if self.whole is None else 1
        return captured_batch(given, settings.micro_batches, degree, settings.captured_parts)

    def proved(
        self, made: Planned, captured: LogicalGraph, batch: Any, numbers: Places = NO_NUMBERS
    ) -> Planned:
        """Return a plan with what is proved of it.

        Args:
            made: Of the captured step.
            captured: The step, captured of such a batch, in the parts that the settings say.
            batch: Of one process.
            numbers: Of Python, that are inputs of the captured step.
        """
        program, known = self.program, self._example(batch)

        def capture(batch: Any) -> LogicalGraph:
            given = (program.model, program.loss_of_step, batch, program.optimizer)
            return capture_step(*given, made.settings, numbers)

        return proved(made, captured, known, program.own_states, capture)


def captured_batch(batch: Any, count: int, degree: int, parts: int) -> Any:
    """Return an example of what is captured of a step over all ranks, of the form of the batch.

    Args:
        batch: An example of what one process gives in one step.
        count: Micro-batches of a step.
        degree: How many such batches a step takes over all ranks.
        parts: Of how many parts of a step one is captured: `count`, or 1 for the whole.

    Raises:
        ConfigError: a tensor of the batch has no samples, or does not divide into micro-batches.
    """
    found = flatten_batch(batch)
    for name, value in found.items():
        if value.dim() and not value.shape[0]:
            raise ConfigError(
                f"the batch has no samples: {name!r} is of shape {tuple(value.shape)}",
                where="batch",
                accepted="at least one sample in each tensor of the batch",
                todo="leave out the steps whose batches are empty",
            )
        if value.dim() and value.shape[0] % count:
            divisors = [n for n in range(1, value.shape[0] + 1) if value.shape[0] % n == 0]
            raise ConfigError(
                f"{name!r} of the batch has {value.shape[0]} samples, which do not divide into "
                f"micro_batches={count}",
                where="the argument micro_batches",
                accepted=f"micro_batches one of {', '.join(map(str, divisors))}",
                todo="take another size of batch, or other micro-batches; if these are time steps, "
                "say along which dim samples lie, such as batch_dim=1",
            )
    taken = {
        name: torch.cat([value[: len(value) // parts]] * degree) if value.dim() else value
        for name, value in found.items()
    }
    return rebuild_batch(batch, taken)


def _num_samples(batch: Any) -> int:
    """Return how many samples a batch has; where its tensors have several, what divides them."""
    return gcd(*(len(value) for value in flatten_batch(batch).values() if value.dim()))


def _resized(batch: Any, size: int) -> Any:
    """Return a batch with so many samples, some of which are there again and again."""
    num = _num_samples(batch)
    if size == num:
        return batch
    rows = {
        name: value[torch.arange(len(value) // num * size) % len(value)] if value.dim() else value
        for name, value in flatten_batch(batch).items()
    }
    return rebuild_batch(batch, rows)


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
            ConfigError: no number of micro-batches makes the step fit its memory.
            SbpError: of the planner.
        """
        choice = self.choice
        if not choice.chooses_micro_batches:
            return self._planned(self.captured, self.settings, pins)
        if choice.chooses_variants:
            found = self._planned(self.captured, self.settings, pins)
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
        problem: SbpError | None = None
        for count in self.family.micro_batches:
            settings = replace(self.settings, micro_batches=count)
            try:
                size = self.family.batch_size // settings.captured_parts
                captured = Captured.of(self.family.captured(size), settings)
                found = self._planned(captured, settings, pins)
                self.check_fits(found)
            except (ConfigError, PlanError) as error:
                if not is_of_memory(error):
                    raise
                problem = error
                batches = counted(count, "micro-batch", "es")
                self.say([f"micro_batches=auto: {batches} would not fit: {error.what}"])
                continue
            self.say([f"micro_batches=auto: {count}, of {self._each(settings)}"])
            return found
        assert problem is not None, "every batch has a divisor"
        raise problem.replaced(
            ConfigError,
            what=f"trainer.micro_batches=auto: not even {self.family.micro_batches[-1]} "
            f"micro-batches make the step fit: {problem.what}",
            # That has been tried.
            todo=problem.todo.replace("set trainer.micro_batches, ", ""),
        ) from problem

    def _each(self, settings: PlanSettings) -> str:
        return counted(self.family.batch_size // settings.micro_batches, "sample")

    def _planned(self, captured: Captured, settings: PlanSettings, pins: Pins | None) -> Planned:
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

    def proved(self, planned: Planned, batch: Any) -> Planned:
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
            return capture.proved(planned, self.captured_as(settings).original, batch)


def is_of_memory(error: SbpError) -> bool:
    """Whether a plan was refused for the memory that it needs."""
    told = " ".join((*error.where, error.accepted))
    return "memory_bytes" in told


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
        following.captured(original, partial(capture, batch))
        captured = capture.prepared(original)
    batch_size = capture.num_samples(batch)
    whole = batch_size // settings.captured_parts

    @cache
    def on_samples(size: int) -> LogicalGraph:
        return original if size == whole else capture.sized(batch, size)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProgram:
    """A program's step, planned.

    Args:
        planned: What is trained, checked and proved.
        captured: What it was planned of.
        capture: Captures it anew.
        plan: Plans a graph with more pins, as this was planned.
        capture_s: Seconds that a capture takes.
    """

    planned: Planned
    captured: Captured
    capture: StepCapture
    plan: PlanAround
    capture_s: float


def plan_program(
    program: OneDeviceProgram,
    batch: Any,
    choice: PlanChoice,
    engine: Engine,
    following: Following,
    training: Training,
    whole: Any = None,
) -> PlannedProgram:
    """Return the checked plan of a program.

    Of a part the whole has to be known before it is planned, and the plan says which parts there
    are: what is usual is tried first, and what the planner then says, second.

    Args:
        program: What is planned.
        batch: An example of what a process gives in one step.
        choice: Who decides how it is split.
        engine: Says for which mesh, and whether processes give parts of a batch.
        following: Is told what was captured.
        training: Has the states around which this is planned, if it is not the first program.
        whole: An example of the batch of all processes, if it is known.

    Raises:
        ConfigError: see `parallelize`.
    """
    settings = engine.settings
    gives_parts, degree = engine.gives_parts and whole is None, 1
    if gives_parts:
        sizes = zip(settings.mesh.axes, settings.mesh.mesh_shape, strict=True)
        degree = prod(size for axis, size in sizes if axis not in _SHARING)
    in_time: Node | None = None

    def look(captured: LogicalGraph) -> None:
        nonlocal in_time
        if whole is None:
            in_time = time_in_front(captured, program.model)
            refuse_cut_time(
                in_time,
                program.model,
                micro_batches=settings.micro_batches,
                processes=engine.world.size if gives_parts else 1,
            )

    for _ in range(2):
        begun_s = time.perf_counter()
        capture = StepCapture(
            program=program, degree=degree, settings=settings, whole=whole, files=choice.files
        )
        planner = step_planner(
            capture, batch, choice, following, look=look, stage=engine.stage, say=engine.say
        )
        capture_s = time.perf_counter() - begun_s
        captured = planner.captured
        states = training.states
        if states.programs:
            plan = partial(_plan_around, choice, settings)
            given = states.planned, captured, settings, plan, states.stored, states.counted
            planned = plan_form(*given, has_pins=bool(choice.pins))
        else:
            planned = planner.plan()
        parts = _batch_parts(planned.graph, planned.strategy) if gives_parts else degree
        if parts == degree:
            break
        degree = parts
    else:
        raise ConfigError(
            "the planner splits the batch in another way whenever its size changes, so that nobody "
            "can say what the part of one process is",
            where="the argument batch_is",
            accepted="batch_is='global', or a batch that is pinned",
            todo=_PIN_BATCH,
        )
    planner.check_fits(planned)
    if whole is None:
        tell_cut_time(planned, batch, in_time, program.model)
    planned = planner.proved(planned, batch)
    settings = planned.settings
    return PlannedProgram(
        planned=planned,
        captured=planner.captured_as(settings),
        capture=replace(capture, settings=settings),
        plan=partial(_plan_around, choice, settings),
        capture_s=capture_s,
    )


def _plan_around(
    choice: PlanChoice, settings: PlanSettings, graph: LogicalGraph, pins: Mapping[str, str]
) -> Strategy:
    return choice.strategy(graph, settings, pins)


def _batch_parts(graph: LogicalGraph, strategy: Strategy) -> int:
    """Return into how many parts the ranks split the samples of a batch.

    Raises:
        ConfigError: tensors of the batch are split in different ways.
    """
    found = {
        entry.name: num_cuts(strategy, entry.name)
        for entry in graph.inputs
        if entry.kind is InputKind.BATCH and graph.tensor(entry.name).shape
    }
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"the tensors of the batch are split into different numbers of parts: {found}",
            where="the argument batch_is",
            accepted="batch_is='global', or one split of all of them",
            todo=_PIN_BATCH,
        )
    return next(iter(found.values()), 1)
