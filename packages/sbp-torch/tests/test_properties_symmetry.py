"""What is compiled, proved and timed of one rank of each class is so of every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import graphs, placements, strategies

import sbp_core.plan_check as check_module
from sbp_core.compile import CompileOptions, compile_plan, order
from sbp_core.compile.actors import ActorId
from sbp_core.compile.instructions import Instructions
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.symmetry import FoldedPlan, fold
from sbp_core.plan_check import check
from sbp_core.simulation import network, simulate


@contextmanager
def _rank_by_rank() -> Iterator[None]:
    """Let no two ranks share anything, and each be a class of its own."""
    programs = Instructions.programs

    def alone(
        plan: PhysicalPlan, marks: Mapping[int, Hashable] | None = None, *, numbers: bool = False
    ) -> FoldedPlan:
        return fold(plan, {part.rank: part.rank for part in plan.ranks})

    def each(made: Instructions, rank: int, stages: frozenset[int]) -> tuple[int, ...]:
        return rank, *programs(made, rank, stages)

    with pytest.MonkeyPatch.context() as patch:
        for module in (order, check_module, network):
            patch.setattr(module, "fold", alone)
        patch.setattr(Instructions, "programs", each)
        yield


def _ends(plan: PhysicalPlan) -> Mapping[tuple[ActorId, int], tuple[float, float, float]]:
    return {
        ((one.rank, one.actor.name), one.index): (one.start_s, one.free_s, one.end_s)
        for one in simulate(plan).firings
    }


def _said(plan: PhysicalPlan) -> object:
    report = check(plan)
    period_s = pytest.approx(report.period_s, rel=1e-9)
    return report.num_firings, report.occupancy, period_s, report.latency_s, _ends(plan)


def _without_orders(plan: PhysicalPlan) -> PhysicalPlan:
    return replace(plan, ranks=tuple(replace(part, orders={}) for part in plan.ranks))


def _is_said_of_every_rank(data: st.DataObject, num_stages: int, num_micro_batches: int) -> None:
    graph = data.draw(graphs(num_micro_batches), "graph")
    strategy = data.draw(strategies(graph, data.draw(placements(num_stages), "stages")), "strategy")
    options = CompileOptions(
        boxing_thread=data.draw(st.booleans(), "boxing thread"),
        overlap=data.draw(st.booleans(), "overlap"),
        bucket_bytes=data.draw(st.sampled_from((None, 0, 64)), "bucket bytes"),
        piece_s=0.0,
        in_place_states=data.draw(st.booleans(), "in place"),
    )

    plan = compile_plan(graph, strategy, options)
    said = _said(plan)
    with _rank_by_rank():
        alone = compile_plan(graph, strategy, options)
        said_alone = _said(plan)

    # Of several orders that are equally good by the rules, each may find another one.
    assert _without_orders(plan) == _without_orders(alone)
    assert said == said_alone


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 2), st.integers(1, 3))
def test_what_is_said_of_a_class_is_said_of_every_rank(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_said_of_every_rank(data, num_stages, num_micro_batches)


@pytest.mark.exhaustive
@settings(max_examples=800, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_what_is_said_of_very_many_classes_is_said_of_every_rank(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _is_said_of_every_rank(data, num_stages, num_micro_batches)
