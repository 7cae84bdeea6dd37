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
from sbp_core.compile.symmetry import Folded, fold
from sbp_core.interpreter.firings import Group, firing_order
from sbp_core.memory import call_layouts, lifetime, memory_bound, predict_memory, storages
from sbp_core.memory.ledger import arguments_of
from sbp_core.memory.lifetime import lifetimes, of_each_rank, peak_bytes, replayed
from sbp_core.memory.rank_events import Events, events_by_rank
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime

#: What fails is not made smaller: that takes minutes.
_QUICK = settings(
    max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
_LONG = settings(max_examples=1500, deadline=None, derandomize=True)


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


@_QUICK
@given(st.data(), st.integers(1, 2), st.integers(1, 3))
def test_any_plan_holds_no_more_than_was_predicted(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _holds_what_was_predicted(data, num_stages, num_micro_batches)


def _ahead_by_counts(
    folded: Folded, order: Sequence[Group], ranks: Sequence[int]
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


def _is_that_of_each_rank(data: st.DataObject, num_stages: int, num_micro_batches: int) -> None:
    _, plan = _draw(data, num_stages, num_micro_batches)
    layouts = call_layouts()

    found = lifetimes(plan, layouts)
    alone = {part.rank: part.rank for part in plan.ranks}
    each = of_each_rank(replayed(plan, layouts, fold(plan, alone), alone))

    # Of several threads of a rank, what comes first of what ends at once is a matter of names.
    peaks = {rank: peak_bytes(one) for rank, one in found.items()}
    assert peaks == {rank: peak_bytes(one) for rank, one in each.items()}
    if all(len(part.orders) == 1 for part in plan.ranks):
        assert found == each


@_QUICK
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_the_memory_of_ranks_that_are_alike_is_that_of_each_of_them(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_that_of_each_rank(data, num_stages, num_micro_batches)


@pytest.mark.exhaustive
@settings(_LONG, max_examples=400)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_the_memory_of_very_many_plans_is_that_of_each_rank(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_that_of_each_rank(data, num_stages, num_micro_batches)


@pytest.mark.exhaustive
@_LONG
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_very_many_plans_hold_no_more_than_was_predicted(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _holds_what_was_predicted(data, num_stages, num_micro_batches)
