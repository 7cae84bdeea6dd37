"""The integer program of placements against all placements and all orders."""

from itertools import permutations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.placement_program import (
    PlacedFlow,
    PlacementProblem,
    fits,
    greedy_placement,
    solve_placement,
    step_of,
)

#: Two ranks, and both.
OPTIONS = (frozenset({0}), frozenset({1}), frozenset({0, 1}))


def shared(seconds):
    """Seconds on one rank, on the other, and on both."""
    return (seconds, seconds, seconds / 2)


@st.composite
def problems(draw, max_groups=4):
    num = draw(st.integers(1, max_groups))
    times = st.integers(1, 9)
    edges = [
        (a, b) for b in range(num) for a in range(b) if draw(st.booleans())
    ]  # fmt: skip
    delays = [draw(st.integers(0, 6)) for _ in edges]
    return PlacementProblem(
        options=OPTIONS,
        forward_s=tuple(shared(float(draw(times))) for _ in range(num)),
        backward_s=tuple(shared(float(draw(times))) for _ in range(num)),
        update_s=tuple((1.0, 1.0, 1.0 + draw(st.integers(0, 4))) for _ in range(num)),
        memory_bytes=tuple((size, size, size) for size in (draw(times) for _ in range(num))),
        flows=tuple(
            PlacedFlow(
                producer=a,
                consumer=b,
                delay_s=tuple(
                    tuple(0.0 if here == there else float(delay) for there in range(3))
                    for here in range(3)
                ),
            )
            for (a, b), delay in zip(edges, delays, strict=True)
        ),
        limit_bytes=draw(st.sampled_from([inf, 24, 12])),
        micro_batches=draw(st.integers(1, 3)),
        is_symmetric=True,
    )


def makespan(seconds, edges, ranks):
    """The least time of tasks, over all orders in which they may begin."""
    num, best = len(seconds), inf
    for order in permutations(range(num)):
        if any(order.index(a) > order.index(b) for a, b, _ in edges):
            continue
        free, ends = {0: 0.0, 1: 0.0}, [0.0] * num
        for task in order:
            arrivals = [ends[a] + delay for a, b, delay in edges if b == task]
            start = max([*arrivals, *(free[rank] for rank in ranks[task])])
            ends[task] = start + seconds[task]
            free |= dict.fromkeys(ranks[task], ends[task])
        best = min(best, max(ends))
    return best


def least(problem):
    """The least time of a step over all placements that fit."""
    best = inf
    for chosen in product(range(3), repeat=problem.num_groups):
        if not fits(problem, chosen):
            continue
        ranks = [problem.options[option] for option in chosen]
        edges = [
            (f.producer, f.consumer, f.delay_s[chosen[f.producer]][chosen[f.consumer]])
            for f in problem.flows
        ]
        forward = [problem.forward_s[i][o] for i, o in enumerate(chosen)]
        backward = [problem.backward_s[i][o] for i, o in enumerate(chosen)]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        update = [problem.update_s[i][o] for i, o in enumerate(chosen)]

        def busiest(seconds, ranks=ranks):
            return max(
                sum(s for s, own in zip(seconds, ranks, strict=True) if rank in own)
                for rank in (0, 1)
            )

        found = makespan(forward, edges, ranks)
        found += makespan(backward, [(b, a, delay) for a, b, delay in edges], ranks)
        found += (problem.micro_batches - 1) * busiest(both) + busiest(update)
        best = min(best, found)
    return best


def check_against_all(problem):
    wanted = least(problem)

    found = solve_placement(problem, time_limit_s=60)

    if wanted == inf:
        assert found is None
        return
    assert found.step_s == pytest.approx(wanted, rel=1e-5)
    assert found.bound_s == pytest.approx(wanted, rel=1e-5)
    assert fits(problem, found.chosen)


@pytest.mark.slow
@settings(derandomize=True, max_examples=40, deadline=None)
@given(problems())
def test_no_placement_and_no_order_takes_less(problem):
    check_against_all(problem)


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(problems(max_groups=5))
def test_it_is_so_of_200_larger_ones(problem):
    check_against_all(problem)


@pytest.mark.slow
@settings(derandomize=True, max_examples=15, deadline=None)
@given(problems(max_groups=5))
def test_a_list_schedule_takes_no_less_than_the_best_order(problem):
    greedy = greedy_placement(problem)

    if greedy is not None:
        assert fits(problem, greedy)
        for option in range(3):
            everything = (option,) * problem.num_groups
            if fits(problem, everything):
                assert step_of(problem, greedy) <= step_of(problem, everything) * (1 + 1e-9)
        solved = solve_placement(problem, time_limit_s=60)
        assert solved.step_s <= step_of(problem, greedy) * (1 + 1e-6)


def two_branches(**changes):
    """A stem, two branches of 5 s forward and backward each, and what joins them."""
    seconds = (1.0, 5.0, 5.0, 1.0)
    there = ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0))
    settings = {
        "options": OPTIONS[:2],
        "forward_s": tuple((one, one) for one in seconds),
        "backward_s": tuple((one, one) for one in seconds),
        "update_s": ((0.0, 0.0),) * 4,
        "memory_bytes": ((1, 1), (4, 4), (4, 4), (1, 1)),
        "flows": tuple(
            PlacedFlow(producer=a, consumer=b, delay_s=tuple(row[:2] for row in there[:2]))
            for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))
        ),
    }
    return PlacementProblem(**{**settings, **changes})


def test_branches_are_placed_side_by_side():
    found = solve_placement(two_branches(), time_limit_s=60)

    assert found.chosen[1] != found.chosen[2]
    # The join is with the branch that the stem was sent to, so that each waits for one transfer.
    assert found.step_s == pytest.approx(2 * (1 + 1 + 5 + 1))
    assert found.gap < 1e-5


def test_memory_parts_what_would_be_faster_together():
    slow = tuple(
        PlacedFlow(producer=f.producer, consumer=f.consumer, delay_s=((0.0, 99.0), (99.0, 0.0)))
        for f in two_branches().flows
    )
    together = solve_placement(two_branches(flows=slow), time_limit_s=60)
    apart = solve_placement(two_branches(flows=slow, limit_bytes=6), time_limit_s=60)

    assert len(set(together.chosen)) == 1
    assert apart.chosen[1] != apart.chosen[2]
    assert solve_placement(two_branches(limit_bytes=3), time_limit_s=60) is None


def test_every_place_is_used_if_it_must_be():
    slow = tuple(
        PlacedFlow(producer=f.producer, consumer=f.consumer, delay_s=((0.0, 99.0), (99.0, 0.0)))
        for f in two_branches().flows
    )

    found = solve_placement(two_branches(flows=slow, uses_all=True), time_limit_s=60)

    assert set(found.chosen) == {0, 1}
