"""Schedules of pipelines: what they refuse, what they take, and what a search finds."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.pipeline import (
    SCHEDULES,
    Action,
    ActionKind,
    PipelineSchedule,
    automatic,
    pipeline_schedule,
    simulate_schedule,
)

NAMED = [name for name in SCHEDULES if name != "auto"]
FLUSHING = [name for name in NAMED if name not in ("pipedream", "2bw")]
UNEQUAL = [[1, Fraction(5, 4), Fraction(3, 4)], [2, 1, 1], [Fraction(1, 3), 1, 2], [1, 3, 0]]


def test_actions_are_read_as_they_are_written() -> None:
    for text in ("0F0", "12B7", "3I10", "1W2"):
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "-1F0", "0F0 "])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(SbpValueError, match="no action"):
        Action.parse(text)


def _of_one_rank(*texts: str) -> PipelineSchedule:
    return PipelineSchedule(
        name="mine",
        num_micro_batches=1,
        placement=((0,),),
        orders=(tuple(map(Action.parse, texts)),),
        micro_batches_per_update=1,
    )


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["0F0"], "0I0"),
        (["0F0", "0F0", "0B0"], "0F0"),
        (["0F0", "0B0", "1F0"], "1F0"),
        (["0F0", "0I0"], "0W0"),
        (["0F0", "0B0", "0W0"], "0W0"),
    ],
)
def test_an_order_with_too_much_or_too_little_is_refused(texts: list[str], named: str) -> None:
    with pytest.raises(SbpValueError, match=named):
        _of_one_rank(*texts)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    backward_first = _of_one_rank("0B0", "0F0")

    with pytest.raises(SbpValueError, match="deadlocks"):
        simulate_schedule(backward_first, [1, 1, 1])


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "accepted"),
    [
        ("interleaved", 4, 7, 2, None),
        ("interleaved", 4, 10, 2, "10"),
        ("interleaved", 4, 9, 2, "8 and 10"),
        ("zbv", 4, 8, 3, "2 of them"),
        ("dualpipev", 4, 7, 2, "at least 8"),
        ("2bw", 4, 3, 1, "at least 4"),
        ("1f1b", 4, 8, 2, "1 of them"),
    ],
)
def test_a_schedule_that_is_not_defined_says_what_is(
    name: str, p: int, m: int, v: int, accepted: str | None
) -> None:
    if accepted is None or accepted == str(m):
        pipeline_schedule(name, p, m, num_chunks=v)
        return
    with pytest.raises(ConfigError) as refused:
        pipeline_schedule(name, p, m, num_chunks=v)

    assert accepted in refused.value.accepted


def test_an_unknown_schedule_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline_schedule("1f1", 4, 8)

    assert "'1f1b'" in refused.value.todo


def test_a_schedule_that_needs_more_memory_than_is_allowed_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 activations"):
        pipeline_schedule("gpipe", 4, 8, memory=4)


@pytest.mark.parametrize(
    "times", [[1, 1], [1, 1, "1"], [1, -1, 1], [0, 1, 1], [1, 0, 0], [[1, 1, 1]], [True, 1, 1]]
)
def test_what_are_no_times_is_refused(times: list[object]) -> None:
    with pytest.raises(ConfigError):
        simulate_schedule(pipeline_schedule("1f1b", 2, 2), times)


def _needed(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """Say what comes before an action, in the words of the definition, whole backwards as I."""
    stage, kind, k = action.stage, action.kind, action.micro_batch
    if kind is ActionKind.FORWARD:
        return [Action(stage - 1, kind, k)] if stage else []
    own = (
        ActionKind.FORWARD if kind is not ActionKind.WEIGHT_GRADIENT else ActionKind.INPUT_GRADIENT
    )
    needed = [Action(stage, own, k)]
    if kind is not ActionKind.WEIGHT_GRADIENT and stage + 1 < schedule.num_stages:
        behind = Action(stage + 1, ActionKind.BACKWARD, k)
        whole = any(behind in order for order in schedule.orders)
        needed.append(behind if whole else Action(stage + 1, ActionKind.INPUT_GRADIENT, k))
    return needed


@pytest.mark.parametrize("name", [name for name in FLUSHING if name != "dualpipev"])
@pytest.mark.parametrize("transfer", [0, Fraction(1, 3)])
def test_actions_begin_as_soon_as_rank_and_inputs_are_there(name: str, transfer: Fraction) -> None:
    schedule = pipeline_schedule(name, 4, 8)
    v = schedule.num_chunks
    simulated = simulate_schedule(schedule, UNEQUAL, transfer=transfer)
    end = {one.action: one.end for order in simulated.ranks for one in order}
    rank_of = schedule.rank_of()

    for rank, order in enumerate(simulated.ranks):
        f, i, w = (Fraction(one) / v for one in UNEQUAL[rank])
        takes = {"F": f, "I": i, "W": w, "B": i + w}
        free = [Fraction(0), *(one.end for one in order)]
        for one, since in zip(order, free, strict=False):
            arrivals = [
                end[other] + (transfer if rank_of[other.stage] != rank else 0)
                for other in _needed(schedule, one.action)
            ]

            assert one.start == max([since, *arrivals])
            assert one.end - one.start == takes[one.action.kind]


def test_an_overlapped_pair_begins_and_ends_as_one() -> None:
    schedule = pipeline_schedule("dualpipev", 4, 10)
    simulated = simulate_schedule(schedule, UNEQUAL)
    end = {one.action: one.end for order in simulated.ranks for one in order}
    start = {one.action: one.start for order in simulated.ranks for one in order}

    assert len(schedule.overlapped) > 4
    for order in schedule.orders:
        for forward, backward in pairwise(order):
            if forward not in schedule.overlapped:
                continue
            assert start[backward] == end[forward]
            for other in _needed(schedule, backward):
                assert start[forward] >= end.get(other, 0)
            following = Action(forward.stage + 1, ActionKind.FORWARD, forward.micro_batch)
            assert following not in start or start[following] >= end[backward]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_the_period_is_that_of_a_long_run(name: str, seed: int) -> None:
    drawn = random.Random(seed)
    p = drawn.randint(1, 5)
    times = [[drawn.randint(1, 5) for _ in range(3)] for _ in range(p)]
    transfer = drawn.randint(0, 6)
    long = simulate_schedule(pipeline_schedule(name, p, 240), times, transfer=transfer)
    ends = [one.end for one in long.ranks[0] if one.action.kind is ActionKind.BACKWARD]

    # All cycles of up to 5 tokens repeat within 60 micro-batches.
    micro_batch = (ends[180] - ends[120]) / 60
    found = simulate_schedule(pipeline_schedule(name, p, 8), times, transfer=transfer).period

    assert found == (micro_batch if name == "pipedream" else 8 * micro_batch)


def test_transfers_between_chunks_of_one_rank_take_no_time() -> None:
    on_one = pipeline_schedule("interleaved", 1, 2, num_chunks=2)

    assert simulate_schedule(on_one, [1, 1, 1], transfer=100).makespan == 6


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "_MOST_TRIED", 40_000)


def _best_named(p: int, m: int, times: list[object], memory: int | None) -> Fraction:
    made = []
    for name in FLUSHING:
        for v in (1, 2):
            try:
                schedule = pipeline_schedule(name, p, m, num_chunks=v, memory=memory)
            except ConfigError:
                continue
            made.append(simulate_schedule(schedule, times).makespan)
    return min(made)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("memory", [None, 3])
def test_auto_is_at_least_as_good_as_any_name(memory: int | None) -> None:
    for times in ([1, 1, 1], [1, 1.25, 0.75], [[1, 2, 1], [2, 1, 1], [1, 1, 2]]):
        found = pipeline_schedule("auto", 3, 4, times=times, memory=memory)
        simulated = simulate_schedule(found, times)

        assert simulated.makespan <= _best_named(3, 4, times, memory)
        assert memory is None or max(simulated.live) <= memory


def test_auto_finds_what_no_name_has() -> None:
    times = [1, 1.25, 0.75]

    found = simulate_schedule(pipeline_schedule("auto", 2, 2, times=times), times)

    assert found.makespan == Fraction("6.625")
    assert found.makespan < _best_named(2, 2, times, None)


@pytest.mark.usefixtures("short_search")
def test_auto_finds_the_same_again() -> None:
    first, second = (pipeline_schedule("auto", 3, 3, times=[1, 2, 1]) for _ in range(2))

    assert first == second


def test_auto_keeps_whole_backwards_where_splitting_gains_nothing() -> None:
    assert not pipeline_schedule("auto", 1, 3).splits_backward


def test_auto_says_that_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="no order"):
        pipeline_schedule("auto", 2, 2, memory=Fraction(1, 4))
