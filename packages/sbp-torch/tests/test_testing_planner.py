"""The suite of planners with a run: passed by bare inference, failed by broken planners.

What fails the suite without a run, from which it inherits, is tested beside that in the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from sbp_core.errors import PlanError
from sbp_core.infer import infer_strategy
from sbp_core.planning import Planner, PlanRequest
from sbp_core.sbp import B, NdSbp
from sbp_core.strategy import Storage, Strategy
from sbp_torch.testing.planner import PlannerRunConformance

MESHES = (((1,), ("data",)), ((3,), ("data",)), ((2, 2), ("pipe", "data")))


class Infers:
    """Plans nothing itself."""

    def plan(self, request: PlanRequest) -> Strategy:
        return infer_strategy(request, planner="infers", pins={"batch": "S(0)"})


class TestInference(PlannerRunConformance):
    meshes = MESHES

    def make_planner(self) -> Planner:
        return Infers()


class ForgetsAnOp(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        strategy = super().plan(request)
        _, *rest = strategy.nodes
        return replace(strategy, nodes={name: strategy.nodes[name] for name in rest})


class CannotBeCompiled(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        strategy = super().plan(request)
        whole = NdSbp(*[B] * strategy.stages[0].num_axes)
        extra = Storage(stage=0, sbp=whole)
        return replace(
            strategy,
            num_micro_batches=strategy.num_micro_batches + 1,
            storage={**strategy.storage, "nobody": extra},
        )


class NeverTheSame(Infers):
    def __init__(self, numbers: count[int]) -> None:
        self.numbers = numbers

    def plan(self, request: PlanRequest) -> Strategy:
        return replace(super().plan(request), report={"seed": next(self.numbers)})


Test = Callable[[PlannerRunConformance], None]

LEGAL = PlannerRunConformance.test_every_op_and_state_has_a_legal_assignment
RUNS = PlannerRunConformance.test_every_strategy_runs_as_one_device_does

BROKEN: list[tuple[Callable[[], Planner], Test, type[Exception]]] = [
    (ForgetsAnOp, RUNS, PlanError),
    (CannotBeCompiled, RUNS, PlanError),
    (CannotBeCompiled, LEGAL, AssertionError),
]


def suite_of(make: Callable[[], Planner]) -> PlannerRunConformance:
    class Suite(PlannerRunConformance):
        meshes = MESHES[1:2]
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


def test_a_planner_that_is_not_deterministic_fails_the_suite() -> None:
    numbers = count()
    suite = suite_of(lambda: NeverTheSame(numbers))

    with pytest.raises(AssertionError, match="another strategy"):
        suite.test_planning_again_gives_the_same_strategy()


def test_an_unbroken_planner_passes_what_the_broken_ones_fail() -> None:
    suite = suite_of(Infers)

    for _, test, _ in BROKEN:
        test(suite)
