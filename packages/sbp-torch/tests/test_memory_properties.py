"""Any plan holds no more than predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_plans import graphs, placements, random_values, strategies

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.symmetry import FoldedPlan, fold
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Ref
from sbp_core.graph.ir import Phase as NodePhase
from sbp_core.interpreter.firings import Group, firing_order
from sbp_core.memory import call_layouts, lifetime, memory_bound, predict_memory, storages
from sbp_core.memory.ledger import arguments_of
from sbp_core.memory.lifetime import lifetimes, of_each_rank, replayed
from sbp_core.memory.rank_events import Events, events_by_rank
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.testing.graphs import Builder
from sbp_core.testing.plans import strategy_of
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime

#: What fails is not made smaller: that takes minutes.
_QUICK = settings(
    max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
_LONG = settings(_QUICK, max_examples=1500)


def _draw(data: st.DataObject, num_stages: int, num_micro_batches: int) -> tuple[Any, PhysicalPlan]:
    graph = data.draw(graphs(num_micro_batches), "graph")
    stages = data.draw(placements(num_stages), "stages")
    strategy = data.draw(strategies(graph, stages), "strategy")
    options = CompileOptions(
        boxing_thread=data.draw(st.booleans(), "boxing thread"),
        bucket_bytes=data.draw(st.sampled_from((None, 0, 64, 200)), "bucket bytes"),
    )
    return graph, compile_plan(graph, strategy, options)


def _holds_what_was_predicted(data: st.DataObject, num_stages: int, num_micro_batches: int) -> None:
    graph, plan = _draw(data, num_stages, num_micro_batches)
    states, batches = random_values(graph, 0)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    meter = MemoryMeter(plan)

    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, states, LocalBackend()) as session, meter.watching(session):
        session.step(whole, {})
        meter.restart()
        session.step(whole, {})

    # Parts that ranks are handed of one value share memory, and then hold less than was predicted;
    # of a batch, more may be seen than the parts. Exact comparisons are in `test_memory.py`.
    batch_bytes = sum(value.nbytes for value in whole.values())
    predicted = predict_memory(plan)
    assert predicted.peak <= memory_bound(plan, graph)
    for rank, memory in predicted.ranks.items():
        assert meter.peak(rank) <= memory.peak + batch_bytes
        assert meter.alive(rank) == memory.resting


@pytest.mark.slow
@_QUICK
@given(st.data(), st.integers(1, 2), st.integers(1, 3))
def test_any_plan_holds_no_more_than_was_predicted(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _holds_what_was_predicted(data, num_stages, num_micro_batches)


def _ahead_by_counts(
    folded: FoldedPlan, order: Sequence[Group], ranks: Sequence[int]
) -> Iterator[tuple[int, Events]]:
    """Yield what `events_ahead` does, by letting one rank after the other go ahead."""
    for rank in ranks:
        ahead = firing_order(folded.plan, folded.stands_for, ahead=rank)
        assert ahead is not None
        yield rank, events_by_rank(folded.plan, ahead)[rank]


def _never_alike(taken: Mapping[str, object]) -> tuple[tuple[object, ...], list[int]]:
    """Return what `arguments_of` does, so that no firing does what another one did."""
    _, storages = arguments_of(taken)  # type: ignore[arg-type]
    return (object(),), storages


@pytest.mark.slow
@_QUICK
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_firings_that_are_repeated_and_messages_that_wait_are_those_of_a_whole_replay(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _, plan = _draw(data, num_stages, num_micro_batches)
    layouts = call_layouts()

    found = lifetimes(plan, layouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storages, "arguments_of", _never_alike)
        patch.setattr(lifetime, "events_ahead", _ahead_by_counts)
        assert found == lifetimes(plan, layouts)


def _is_that_of_each_rank(plan: PhysicalPlan) -> None:
    layouts = call_layouts()

    found = lifetimes(plan, layouts)

    alone = {part.rank: part.rank for part in plan.ranks}
    assert found == of_each_rank(replayed(plan, layouts, fold(plan, alone), alone))


@pytest.mark.slow
@_QUICK
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_the_memory_of_ranks_that_are_alike_is_that_of_each_of_them(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_that_of_each_rank(_draw(data, num_stages, num_micro_batches)[1])


@pytest.mark.parametrize("in_flight", [1, 2])
def test_ranks_of_two_threads_that_meet_their_like_are_ahead_of_it(in_flight: int) -> None:
    # In step with its like, a rank had its collective before it went on computing.
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("sent", "relu.default", (Ref("x"),), (4, 4), pointwise=True)
    b.op("t", "t.default", (Ref("x"),), (4, 4))
    b.op("loss", "sum.default", (Ref("t"),), ())
    b.op("g", "neg.default", (Ref("sent"),), (4, 4), phase=NodePhase.BACKWARD, pointwise=True)
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    graph = accumulate(b.graph(), 2)
    rows = dict.fromkeys(("sent", "g"), "S(0) -> S(0)")
    forward = dict.fromkeys(("sent", "t", "loss", "loss.mean"), 1)
    strategy = strategy_of(
        graph,
        (Placement([0, 1], ["data"]), Placement([2, 3], ["data"])),
        signatures={**rows, "t": "S(1) -> S(0)", "loss": "S(0) -> P"},
        storage={"x": "S(0)"},
        node_stages=forward,
        input_stages={"x": 1},
        in_flight=(in_flight, in_flight),
    )

    plan = compile_plan(graph, strategy, CompileOptions(boxing_thread=True))

    assert [len(part.orders) for part in plan.ranks] == [2, 2, 2, 2]
    _is_that_of_each_rank(plan)


def test_a_rank_that_sends_to_its_like_holds_that_for_longer_also_where_the_peak_is_the_same() -> (
    None
):
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("sent", "relu.default", (Ref("x"),), (4, 4), pointwise=True)
    b.op("loss", "sum.default", (Ref("sent"),), ())
    # The peak is here, when all that was sent is there.
    terms = {"g": ("x",), "h": ("x", "g"), "i": ("g", "h"), "j": ("g", "i")}
    for name, needs in terms.items():
        op = "neg.default" if len(needs) == 1 else "add.Tensor"
        args = tuple(map(Ref, needs))
        b.op(name, op, args, (4, 4), phase=NodePhase.BACKWARD, pointwise=True)
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    rows, crossed = "S(0), B", "S(1), S(1)"
    signatures = {n: f"{' | '.join([rows] * len(needs))} -> {rows}" for n, needs in terms.items()}
    signatures |= {"sent": f"{rows} -> {rows}", "loss": f"{crossed} -> P, P"}
    mesh = Placement([[0, 1], [2, 3]], ["a", "b"])
    strategy = strategy_of(b.graph(), (mesh,), signatures=signatures, storage={"x": rows})

    plan = compile_plan(b.graph(), strategy)

    assert plan.links and len(fold(plan).members) == 1
    _is_that_of_each_rank(plan)


@pytest.mark.exhaustive
@settings(_LONG, max_examples=400)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_the_memory_of_very_many_plans_is_that_of_each_rank(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_that_of_each_rank(_draw(data, num_stages, num_micro_batches)[1])


@pytest.mark.exhaustive
@_LONG
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_very_many_plans_hold_no_more_than_was_predicted(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _holds_what_was_predicted(data, num_stages, num_micro_batches)
