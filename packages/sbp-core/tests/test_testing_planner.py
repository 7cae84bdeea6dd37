"""The suite of planners without a run: passed by inference, failed by broken planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sbp_core.errors import PlanError, SbpError
from sbp_core.infer import infer_strategy
from sbp_core.planning import Planner, PlanRequest
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Signature, Strategy
from sbp_core.testing.planner import PlannerConformance


class Infers:
    """Plans nothing itself."""

    def plan(self, request: PlanRequest) -> Strategy:
        return infer_strategy(request, planner="infers", pins={"batch": "S(0)"})


class TestInference(PlannerConformance):
    def make_planner(self) -> Planner:
        return Infers()


class ForgetsAnOp(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        strategy = super().plan(request)
        _, *rest = strategy.nodes
        return replace(strategy, nodes={name: strategy.nodes[name] for name in rest})


class CutsTheContractedDimOnOneSide(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        strategy = super().plan(request)
        old = strategy.nodes["layers.0.mm"]
        inputs = (NdSbp.parse("S(1)"), NdSbp.parse("S(1)"))
        changed = replace(old, signature=Signature(inputs, old.signature.outputs))
        return replace(strategy, nodes={**strategy.nodes, "layers.0.mm": changed})


class IgnoresConstraints(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        return super().plan(replace(request, pins={}))


class CannotBeWritten(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        return replace(super().plan(request), report={"why": {"fast", "small"}})


class GoesBeyondTheEnd(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        assert request.progress is not None
        request.progress("planning", 1.5)
        return super().plan(request)


Test = Callable[[PlannerConformance], None]

LEGAL = PlannerConformance.test_every_op_and_state_has_a_legal_assignment
COMPILES = PlannerConformance.test_every_strategy_compiles_and_passes_the_check

BROKEN: list[tuple[Callable[[], Planner], Test, type[Exception]]] = [
    (ForgetsAnOp, LEGAL, AssertionError),
    (ForgetsAnOp, COMPILES, PlanError),
    (CutsTheContractedDimOnOneSide, LEGAL, SbpError),
    (
        IgnoresConstraints,
        PlannerConformance.test_a_constraint_of_the_user_is_kept,
        AssertionError,
    ),
    (CannotBeWritten, PlannerConformance.test_strategies_survive_their_file_format, TypeError),
    (
        GoesBeyondTheEnd,
        PlannerConformance.test_planning_again_gives_the_same_strategy,
        AssertionError,
    ),
]


def suite_of(make: Callable[[], Planner]) -> PlannerConformance:
    class Suite(PlannerConformance):
        meshes = (((2,), ("data",)),)
        micro_batches = (1,)

        def make_planner(self) -> Planner:
            return make()

    return Suite()


@pytest.mark.parametrize(("make", "test", "error"), BROKEN)
def test_a_broken_planner_fails_the_suite(
    make: Callable[[], Planner], test: Test, error: type[Exception]
) -> None:
    suite = suite_of(make)

    with pytest.raises(error):
        test(suite)


def test_an_unbroken_planner_passes_what_the_broken_ones_fail() -> None:
    suite = suite_of(Infers)

    for _, test, _ in BROKEN:
        test(suite)


class ReturnsNothing:
    def plan(self, request: PlanRequest) -> None:
        """Forget the strategy."""


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (ReturnsNothing(), "plan returned None, not a Strategy"),
        (3, "make_planner returned 3, which has no method plan"),
    ],
)
def test_what_plans_nothing_is_told_so(made: Any, says: str) -> None:
    class Suite(PlannerConformance):
        def make_planner(self) -> Planner:
            return made

    with pytest.raises(AssertionError, match=says):
        Suite().test_every_strategy_compiles_and_passes_the_check()
