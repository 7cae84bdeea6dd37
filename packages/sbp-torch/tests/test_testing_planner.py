"""The suite of planners: passed by bare inference, failed by broken planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from sbp_core.errors import PlanError, SbpError
from sbp_core.infer import infer_strategy
from sbp_core.plugins.kinds import Planner, PlanRequest
from sbp_core.sbp import B, NdSbp
from sbp_core.strategy import Signature, Storage, Strategy
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


class CutsWhatCannotBeCut(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        strategy = super().plan(request)
        nodes = dict(strategy.nodes)
        name = next(name for name in nodes if name.endswith("native_layer_norm"))
        old = nodes[name]
        split = NdSbp.parse(", ".join(["S(1)"] * strategy.stages[old.stage].num_axes))
        inputs = (split, *old.signature.inputs[1:])
        changed = Signature(inputs, old.signature.outputs)
        nodes[name] = replace(old, signature=changed)
        return replace(strategy, nodes=nodes)


class IgnoresConstraints(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        return super().plan(replace(request, pins={}))


class CannotBeWritten(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        return replace(super().plan(request), report={"why": {"fast", "small"}})


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


class GoesBeyondTheEnd(Infers):
    def plan(self, request: PlanRequest) -> Strategy:
        assert request.progress is not None
        request.progress("planning", 1.5)
        return super().plan(request)


class NeverTheSame(Infers):
    def __init__(self, numbers: count[int]) -> None:
        self.numbers = numbers

    def plan(self, request: PlanRequest) -> Strategy:
        return replace(super().plan(request), report={"seed": next(self.numbers)})


Test = Callable[[PlannerRunConformance], None]

BROKEN: list[tuple[Callable[[], Planner], Test, type[Exception]]] = [
    (
        ForgetsAnOp,
        PlannerRunConformance.test_every_op_and_state_has_a_legal_assignment,
        AssertionError,
    ),
    (ForgetsAnOp, PlannerRunConformance.test_every_strategy_runs_as_one_device_does, PlanError),
    (
        CutsWhatCannotBeCut,
        PlannerRunConformance.test_every_op_and_state_has_a_legal_assignment,
        SbpError,
    ),
    (
        IgnoresConstraints,
        PlannerRunConformance.test_a_constraint_of_the_user_is_kept,
        AssertionError,
    ),
    (CannotBeWritten, PlannerRunConformance.test_strategies_survive_their_file_format, TypeError),
    (
        CannotBeCompiled,
        PlannerRunConformance.test_every_strategy_runs_as_one_device_does,
        PlanError,
    ),
    (
        CannotBeCompiled,
        PlannerRunConformance.test_every_op_and_state_has_a_legal_assignment,
        AssertionError,
    ),
    (
        GoesBeyondTheEnd,
        PlannerRunConformance.test_planning_again_gives_the_same_strategy,
        AssertionError,
    ),
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
