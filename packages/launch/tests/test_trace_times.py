from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from trainable import plan_step, planned, run_config, run_of

from sbp_core.compile import Collective, PhysicalPlan, Receive, Send
from sbp_core.runtime import Span, SpanKind
from sbp_launch.tracing.times import last_arrivals, rank_times, time_table
from sbp_launch.trainer.run_program import make_program

MS = 1_000_000


@cache
def data_parallel() -> PhysicalPlan:
    return planned().plan


@cache
def pipeline() -> PhysicalPlan:
    run = run_of(run_config(axes=("pipe",), micro_batches=2))
    return plan_step(run, make_program(run)).plan


def actor_of(plan: PhysicalPlan, rank: int, kind: type | tuple[type, ...]) -> str:
    return next(actor.name for actor in plan.by_rank[rank].actors if isinstance(actor, kind))


def fired(
    plan: PhysicalPlan, rank: int, actor: str, begin_ms: int, end_ms: int, step: int = 0
) -> Span:
    thread = plan.by_rank[rank].by_name[actor].thread
    return Span(SpanKind.FIRING, rank, thread, step, actor, 0, begin_ms * MS, end_ms * MS)


def collective_case() -> tuple[list[Span], list[Span]]:
    """Rank 1 computes until 30 ms, rank 0 until 10; then both box until 50."""
    plan = data_parallel()
    shared = actor_of(plan, 0, Collective)
    first = plan.by_rank[0].actors[0].name
    rank_0 = [fired(plan, 0, first, 0, 10), fired(plan, 0, shared, 10, 50)]
    rank_1 = [fired(plan, 1, first, 0, 30), fired(plan, 1, shared, 30, 50)]
    return rank_0, rank_1


def test_a_collective_waits_for_the_rank_that_comes_last() -> None:
    rank_0, rank_1 = collective_case()

    (late,) = last_arrivals(data_parallel(), rank_0 + rank_1).items()

    assert late[0] is rank_0[1]
    assert (late[1].rank, late[1].until_ns) == (1, 30 * MS)


def test_waiting_is_told_from_boxing_and_computing() -> None:
    rank_0, rank_1 = collective_case()

    times = rank_times(data_parallel(), rank_0 + rank_1)

    first, second = times[0, "compute"], times[1, "compute"]
    assert (first.steps, first.compute, first.waiting, first.boxing) == (
        50 * MS, 10 * MS, 20 * MS, 20 * MS,
    )  # fmt: skip
    assert (second.steps, second.compute, second.waiting, second.boxing) == (
        50 * MS, 30 * MS, 0, 20 * MS,
    )  # fmt: skip
    assert first.late == {1: 20 * MS}
    assert not second.late
    assert first.rest == second.rest == 0


def test_a_call_that_ends_before_the_last_rank_comes_waits_no_longer_than_it_lasts() -> None:
    (first, shared), rank_1 = collective_case()
    spans = [first, replace(shared, end_ns=20 * MS), *rank_1]

    times = rank_times(data_parallel(), spans)[0, "compute"]

    assert (times.waiting, times.boxing) == (10 * MS, 0)


def test_the_end_of_a_call_waits_for_the_rank_that_begins_it_last() -> None:
    plan, shared = data_parallel(), actor_of(data_parallel(), 0, Collective)
    begun = [fired(plan, 0, shared, 0, 1), fired(plan, 1, shared, 30, 31)]
    ends = [
        replace(
            fired(plan, rank, plan.by_rank[rank].actors[0].name, begin, 50),
            kind=SpanKind.BLOCKED,
            waits_for=f"the end of {shared}, something else",
        )
        for rank, begin in ((0, 10), (1, 35))
    ]

    times = rank_times(plan, begun + ends)

    first, second = times[0, "compute"], times[1, "compute"]
    assert (first.waiting, first.boxing, first.late) == (20 * MS, 21 * MS, {1: 20 * MS})
    assert (second.waiting, second.boxing) == (0, 16 * MS)


def test_a_receive_waits_for_its_sender() -> None:
    plan = pipeline()
    link = plan.links[0]
    sent = fired(plan, *link.sender, 40, 41)
    received = fired(plan, *link.receiver, 5, 45)

    late = last_arrivals(plan, [sent, received])

    assert isinstance(plan.by_rank[link.sender[0]].by_name[link.sender[1]], Send)
    assert isinstance(plan.by_rank[link.receiver[0]].by_name[link.receiver[1]], Receive)
    assert {span: (one.rank, one.until_ns) for span, one in late.items()} == {
        received: (link.sender[0], 40 * MS)
    }


def test_waits_for_data_and_for_turns_are_no_computing() -> None:
    plan = data_parallel()
    firing = fired(plan, 0, plan.by_rank[0].actors[0].name, 10, 50)
    blocked = replace(firing, kind=SpanKind.BLOCKED, begin_ns=0, end_ns=10 * MS)
    turn = replace(firing, kind=SpanKind.TURN, end_ns=25 * MS)

    times = rank_times(plan, [blocked, turn, firing])[0, "compute"]

    assert (times.steps, times.waiting, times.turn) == (50 * MS, 10 * MS, 15 * MS)
    assert (times.compute, times.rest) == (25 * MS, 0)


def test_the_table_is_the_mean_of_the_steps_and_has_no_empty_columns() -> None:
    rank_0, rank_1 = collective_case()
    first, second = rank_0 + rank_1, []
    for span in first:
        second.append(
            replace(span, step=2, begin_ns=span.begin_ns + 10**9, end_ns=span.end_ns + 10**9)
        )

    assert time_table(data_parallel(), first + second) == [
        "where the time of a step went (mean of steps 1-3)",
        "  rank   step  compute  boxing  for others  most for",
        "     0  50 ms    10 ms   20 ms       20 ms    rank 1",
        "     1  50 ms    30 ms   20 ms           -         -",
    ]


@pytest.mark.parametrize(("num_ranks", "num_lines"), [(16, 18), (18, 19)])
def test_of_many_ranks_some_are_shown(num_ranks: int, num_lines: int) -> None:
    (part, *_) = data_parallel().ranks
    ranks = tuple(replace(part, rank=rank) for rank in range(num_ranks))
    plan = replace(data_parallel(), ranks=ranks)
    spans = [fired(plan, rank, part.actors[0].name, 0, 10) for rank in range(num_ranks)]

    lines = time_table(plan, spans, "trace.json")

    assert len(lines) == num_lines
    assert lines[0] == "where the time of a step went (mean of step 1)"
    assert (lines[-1] == "  and 2 more in trace.json") == (num_ranks == 18)
