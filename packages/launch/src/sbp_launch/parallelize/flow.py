"""From what `parallelize` is given to a checked plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.plugins import Planner
from sbp_core.sbp import S
from sbp_core.strategy import Strategy
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.following import Following
from sbp_launch.parallelize.forms import Forms
from sbp_launch.parallelize.numbers import FollowedNumbers, Places
from sbp_launch.parallelize.program import OneDeviceProgram, captured_batch
from sbp_launch.planning.flow import (
    Captured,
    Planned,
    PlanSettings,
    capture_step,
    capture_training,
    check_fits,
    compiled,
    regathering,
)
from sbp_launch.planning.proving import proved

#: How tensors are pinned: a pattern of names -> SBP, or SBP by mesh axis.
Pins = Mapping[str, str | Mapping[str, str]]

#: Axes along which ranks do not split a batch, unless their planner says so.
_SHARING = ("pipe", "tensor")

_PIN_BATCH = "pin it: pins={'batch': {'data': 'S(0)', '*': 'B'}}"


def plan_program(
    program: OneDeviceProgram,
    batch: Any,
    planner: Planner | Strategy,
    pins: Pins | None,
    engine: Engine,
    following: Following,
) -> tuple[Forms, int]:
    """Return the checked plan, and of how many parts of processes a batch consists.

    Of a part the whole has to be known before it is planned, and the plan says which parts there
    are: what is usual is tried first, and what the planner then says, second.

    Args:
        program: What is planned.
        batch: An example of what a process gives in one step.
        planner: Decides; or what was decided.
        pins: The user's.
        engine: Says for which mesh, and whether processes give parts of a batch.
        following: Is told what was captured.

    Raises:
        ConfigError: see `parallelize`.
    """
    settings = engine.settings
    degree = 1
    if engine.gives_parts:
        sizes = zip(settings.mesh.axes, settings.mesh.mesh_shape, strict=True)
        degree = prod(size for axis, size in sizes if axis not in _SHARING)
    for _ in range(2):
        example = captured_batch(batch, settings.micro_batches, degree, settings.captured_parts)
        given = (program.model, program.loss, example, program.optimizer)
        captured = capture_training(*given, settings)
        graph, strategy = captured.planned(lambda graph: _strategy(graph, planner, pins, settings))
        parts = _batch_parts(graph, strategy) if engine.gives_parts else 1
        if parts == degree:
            planned = compiled(graph, strategy, settings)
            check_fits(planned, settings.cluster)
            again = partial(capture_step, *given, settings)
            following.captured(captured.original, again)

            def capture(batch: Any, numbers: Places, degree: int = degree) -> LogicalGraph:
                own = captured_batch(batch, settings.micro_batches, degree, settings.captured_parts)
                given = (program.model, program.loss, own, program.optimizer)
                return capture_step(*given, settings, numbers)

            def prove(made: Planned, of: Captured, batch: Any, degree: int = degree) -> Planned:
                own = captured_batch(batch, settings.micro_batches, degree, settings.captured_parts)
                return _proved(made, of, own, program)

            def prepare(graph: LogicalGraph, numbers: Places) -> Captured:
                return Captured.of(graph, settings, numbers)

            made = _proved(planned, captured, example, program)
            numbers = FollowedNumbers(capture, prepare)
            return Forms(made, captured, engine, following, numbers, prove), degree
        degree = parts
    raise ConfigError(
        "the planner splits the batch in another way whenever its size changes, so that nobody can "
        "say what the part of one process is",
        where="the argument batch_is",
        accepted="batch_is='global', or a batch that is pinned",
        todo=_PIN_BATCH,
    )


def _proved(
    planned: Planned, captured: Captured, example: Any, program: OneDeviceProgram
) -> Planned:
    """Return the plan with what is proved of it."""

    def capture(batch: Any) -> LogicalGraph:
        given = (program.model, program.loss, batch, program.optimizer)
        return capture_step(*given, planned.settings, captured.numbers)

    return proved(planned, captured.original, example, program.own_states, capture)


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
    found = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.BATCH and graph.tensor(entry.name).shape:
            stored = strategy.storage[entry.name]
            sizes = strategy.stages[stored.stage].mesh_shape
            split = zip(stored.sbp, sizes, strict=True)
            found[entry.name] = prod(size for sbp, size in split if sbp == S(0))
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"the tensors of the batch are split into different numbers of parts: {found}",
            where="the argument batch_is",
            accepted="batch_is='global', or one split of all of them",
            todo=_PIN_BATCH,
        )
    return next(iter(found.values()), 1)
