"""From a program to a checked and proved plan of its step.

    program ── capture ──> Captured ── StepPlanner.plan ──> Planned ── proof ──> PlannedProgram
                  │                        │
                  │                        └ calls the planner; for micro_batches="auto", one that
                  │                          does not choose their number is called for 1, 2, ...
                  └ a guard checks that the capture changes nothing that the program reads

`parallelize` makes a `PlanChoice` from its arguments, and `sbp-train` from its config.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from sbp_core.errors import ConfigError
from sbp_core.graph import InputKind, LogicalGraph, Node
from sbp_core.strategy import Strategy
from sbp_launch.planning.flow import Captured, Planned, PlanSettings
from sbp_launch.planning.shared_states import PlanAround, plan_form
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.step_capture import StepCapture
from sbp_launch.step.step_planner import PlanChoice, step_planner
from sbp_launch.step.time_steps import num_cuts, refuse_cut_time, tell_cut_time, time_in_front
from sbp_launch.step.training import Training

#: Axes along which ranks do not split a batch, unless the planner does so.
_SHARING = ("pipe", "tensor")

_PIN_BATCH = "pin it: pins={'batch': {'data': 'S(0)', '*': 'B'}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProgram:
    """The planned step of a program.

    Args:
        planned: The plan, checked and proved.
        captured: The captured step from which it was planned.
        capture: Captures the step again.
        plan: Plans a graph with additional pins, in the same way as this step.
        capture_s: Seconds that one capture takes.
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

    If processes give parts of a batch, the size of the whole batch must be known before planning,
    but it depends on the plan, which splits the batch. So the usual split is tried first, and the
    split of the resulting plan second.

    Args:
        program: The program to plan.
        batch: An example of what a process gives in one step.
        choice: The planner, pins and further choices.
        engine: Has the mesh; knows whether processes give parts of a batch.
        following: Gets the captured graph.
        training: Has the states, whose layouts a further program must keep.
        whole: An example of the batch of all processes, if known.

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
            "the planner splits the batch in another way whenever its size changes, so the part "
            "of one process is not defined",
            where="the argument batch_is",
            accepted="batch_is='global', or a batch that is pinned",
            todo=_PIN_BATCH,
        )
    planner.check_fits(planned)
    if whole is None:
        tell_cut_time(planned, batch, in_time, program.model)
    planned = planner.add_proof(planned, batch)
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
    """Return the number of parts into which the ranks split the samples of a batch.

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
