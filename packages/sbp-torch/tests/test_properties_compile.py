"""Any graph under any legal strategy computes what one device computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import graphs, placements, random_values, strategies

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.physical import PLAN, PhysicalPlan
from sbp_core.graph import LogicalGraph
from sbp_core.plan_check import check
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.runtime.single import run_graph


def _compare_with_one_device(graph: LogicalGraph, plan: PhysicalPlan, seed: int) -> None:
    states, batches = random_values(graph, seed)
    session = ReferenceSession(plan, states, ReferenceConfig())
    expected = dict(states)

    for _ in range(2):
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        result = session.step(whole, {})
        outputs, expected = run_graph(graph, expected, batches, {}, plan.staleness)

        torch.testing.assert_close(dict(result.outputs), outputs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(session.state_dict(), expected, rtol=1e-9, atol=1e-9)


def _any_plan_is_right(data: st.DataObject, num_stages: int, num_micro_batches: int) -> None:
    graph = data.draw(graphs(num_micro_batches), "graph")
    stages = data.draw(placements(num_stages), "stages")
    strategy = data.draw(strategies(graph, stages), "strategy")
    options = CompileOptions(
        boxing_thread=data.draw(st.booleans(), "boxing thread"),
        bucket_bytes=data.draw(st.sampled_from((None, 0, 64, 200)), "bucket bytes"),
        piece_s=data.draw(st.sampled_from((2e-4, 0.0)), "piece"),
        prefetch=data.draw(st.integers(0, 2), "prefetch"),
    )

    plan = compile_plan(graph, strategy, options)
    report = check(plan)

    quotas = {(part.rank, r.name): r.quota for part in plan.ranks for r in part.registers}
    assert all(live <= quotas[place] for place, live in report.occupancy.items())
    assert PLAN.load(PLAN.dump(plan)).hash == plan.hash
    _compare_with_one_device(graph, plan, data.draw(st.integers(0, 9), "seed"))


_QUICK = settings(max_examples=40, deadline=None, derandomize=True)
_LONG = settings(max_examples=1500, deadline=None, derandomize=True)


@pytest.mark.slow
@_QUICK
@given(st.data())
def test_any_strategy_of_one_stage_computes_what_one_device_computes(data: st.DataObject) -> None:
    _any_plan_is_right(data, num_stages=1, num_micro_batches=1)


@pytest.mark.slow
@_QUICK
@given(st.data(), st.integers(1, 3))
def test_any_pipeline_of_two_stages_computes_what_one_device_computes(
    data: st.DataObject, num_micro_batches: int
) -> None:
    _any_plan_is_right(data, num_stages=2, num_micro_batches=num_micro_batches)


@pytest.mark.exhaustive
@_LONG
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_very_many_strategies_compute_what_one_device_computes(
    data: st.DataObject, num_stages: int, num_micro_batches: int
) -> None:
    _any_plan_is_right(data, num_stages, num_micro_batches)
