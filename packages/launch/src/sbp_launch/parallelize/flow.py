"""From what `parallelize` is given to a checked plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from sbp_core.compile import check_strategy
from sbp_core.errors import CaptureError, ConfigError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.plugins import Planner
from sbp_core.strategy import Strategy
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.following import Following
from sbp_launch.parallelize.numbers import Places
from sbp_launch.parallelize.program import OneDeviceProgram, captured_batch
from sbp_launch.parallelize.time_steps import (
    num_cuts,
    refuse_cut_time,
    tell_cut_time,
    time_in_front,
)
from sbp_launch.parallelize.training import Training
from sbp_launch.planning.beside import PlanAround, plan_form
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
from sbp_torch.capture import NO_NUMBERS, flatten_batch

#: How tensors are pinned: a pattern of names -> SBP, or SBP by mesh axis.
Pins = Mapping[str, str | Mapping[str, str]]

#: Axes along which ranks do not split a batch, unless their planner says so.
_SHARING = ("pipe", "tensor")

_PIN_BATCH = "pin it: pins={'batch': {'data': 'S(0)', '*': 'B'}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """Captures the step of a program, and proves what was planned of it.

    Args:
        program: Whose step.
        degree: Of how many parts of processes a batch consists.
        settings: How it is captured.
    """

    program: OneDeviceProgram
    degree: int
    settings: PlanSettings

    def __call__(self, batch: Any, numbers: Places = NO_NUMBERS, /) -> LogicalGraph:
        """Return the step of a batch of one process, as it is captured of the program now.

        Args:
            batch: An example.
            numbers: Of Python, that are inputs of the step.

        Raises:
            SbpError: it cannot be captured.
        """
        try:
            return capture_step(*self._given(batch), self.settings, numbers)
        except CaptureError as error:
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
        if given == taken:
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

    def _given(self, batch: Any) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
        program = self.program
        return program.model, program.loss_of_step, self._example(batch), program.optimizer

    def _example(self, batch: Any) -> Any:
        settings = self.settings
        parts = settings.captured_parts
        return captured_batch(batch, settings.micro_batches, self.degree, parts)

    def proved(self, made: Planned, captured: Captured, batch: Any) -> Planned:
        """Return a plan with what is proved of it.

        Args:
            made: Of the captured step.
            captured: Of such a batch.
            batch: Of one process.
        """
        program = self.program

        def capture(batch: Any) -> LogicalGraph:
            given = (program.model, program.loss_of_step, batch, program.optimizer)
            return capture_step(*given, made.settings, captured.numbers)

        return proved(made, captured.original, self._example(batch), program.own_states, capture)


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
    planner: Planner | Strategy,
    pins: Pins | None,
    engine: Engine,
    following: Following,
    training: Training,
) -> PlannedProgram:
    """Return the checked plan of a program.

    Of a part the whole has to be known before it is planned, and the plan says which parts there
    are: what is usual is tried first, and what the planner then says, second.

    Args:
        program: What is planned.
        batch: An example of what a process gives in one step.
        planner: Decides; or what was decided.
        pins: The user's.
        engine: Says for which mesh, and whether processes give parts of a batch.
        following: Is told what was captured.
        training: Has the states around which this is planned, if it is not the first program.

    Raises:
        ConfigError: see `parallelize`.
    """
    settings = engine.settings
    degree = 1
    if engine.gives_parts:
        sizes = zip(settings.mesh.axes, settings.mesh.mesh_shape, strict=True)
        degree = prod(size for axis, size in sizes if axis not in _SHARING)

    def plan(graph: LogicalGraph, more: Mapping[str, str]) -> Strategy:
        return _strategy(graph, planner, {**more, **(pins or {})} or None, settings)

    for _ in range(2):
        capture = StepCapture(program=program, degree=degree, settings=settings)
        begun_s = time.perf_counter()
        made = capture(batch)
        capture_s = time.perf_counter() - begun_s
        in_time = time_in_front(made, program.model)
        refuse_cut_time(
            in_time,
            program.model,
            micro_batches=settings.micro_batches,
            processes=engine.world.size if engine.gives_parts else 1,
        )
        captured = capture.prepared(made)
        states = training.states
        if states.programs:
            given = states.planned, captured, settings, plan, states.stored, states.counted
            planned = plan_form(*given, has_pins=bool(pins))
        else:
            graph, strategy = captured.planned(partial(plan, more={}))
            planned = compiled(graph, strategy, settings)
        parts = _batch_parts(planned.graph, planned.strategy) if engine.gives_parts else 1
        if parts == degree:
            check_fits(planned, settings.cluster)
            tell_cut_time(planned, batch, in_time, program.model)
            following.captured(captured.original, partial(capture, batch))
            planned = capture.proved(planned, captured, batch)
            return PlannedProgram(
                planned=planned, captured=captured, capture=capture, plan=plan, capture_s=capture_s
            )
        degree = parts
    raise ConfigError(
        "the planner splits the batch in another way whenever its size changes, so that nobody can "
        "say what the part of one process is",
        where="the argument batch_is",
        accepted="batch_is='global', or a batch that is pinned",
        todo=_PIN_BATCH,
    )


def _strategy(
    graph: LogicalGraph, planner: Planner | Strategy, pins: Pins | None, settings: PlanSettings
) -> Strategy:
    """Return how the graph is split.

    Raises:
        ConfigError: a strategy was given, and pins beside it.
    """
    if not isinstance(planner, Strategy):
        return regathering(planner.plan(settings.request(graph, pins)), settings.compile)
    if pins:
        raise ConfigError(
            "pins are given beside a strategy, which has decided on everything",
            where="the argument pins",
            todo="leave out pins, or choose a planner",
        )
    check_strategy(graph, planner)
    return planner


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
