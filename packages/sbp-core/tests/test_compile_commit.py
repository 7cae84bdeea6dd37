"""Where the commit stands: behind all that can fail without harm, before what overwrites states."""

from __future__ import annotations

import pytest
from planned_by_hand import with_mean

from sbp_core.compile import COMMIT, CompileOptions, compile_plan
from sbp_core.compile.dataflow import downstream, rank_successors
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.testing.graphs import chain
from sbp_core.testing.plans import data_parallel_plan, diamond, pipeline_plan, strategy_of

_OPTIONS = [
    CompileOptions(boxing_thread=boxing_thread, overlap=overlap, piece_s=0.0, in_place_states=taken)
    for boxing_thread, overlap in ((False, False), (False, True), (True, False))
    for taken in (True, False)
]


def _plan(kind: str, options: CompileOptions) -> PhysicalPlan:
    if kind == "data":
        return data_parallel_plan(options)
    if kind == "pipeline":
        return pipeline_plan(4, (2, 1), options=options)
    graph = with_mean()
    return compile_plan(graph, strategy_of(graph), options)


@pytest.mark.parametrize("kind", ["data", "pipeline", "carried"])
@pytest.mark.parametrize("options", _OPTIONS)
def test_what_overwrites_states_waits_for_the_commit_which_waits_for_all_else(
    kind: str, options: CompileOptions
) -> None:
    plan = _plan(kind, options)

    check(plan)
    for part in plan.ranks:
        after = rank_successors(part)
        behind = downstream(after, [COMMIT])
        assert {a.name for a in part.actors if a.in_place} <= behind
        assert any(a.in_place for a in part.actors) == options.in_place_states
        before = {a.name for a in part.actors} - behind
        assert all(COMMIT in downstream(after, [name]) for name in before)
        # What comes behind it overwrites a state, or needs what does.
        updates = [a.name for a in part.actors if a.in_place]
        assert behind == downstream(after, updates) | {COMMIT}


def test_one_rank_and_a_plan_that_writes_nothing_need_no_commit() -> None:
    alone = compile_plan(diamond(), strategy_of(diamond(), [Placement([0], ["rank"])]))
    reading = compile_plan(chain(), strategy_of(chain()))

    assert all(COMMIT not in part.by_name for plan in (alone, reading) for part in plan.ranks)
