"""The ways to do a collective: hand-computed times, sharing, nodes, and laws for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing import StepKind
from sbp_core.boxing.algorithms import LinkRates, Membership, RankGroup, timed_algorithms
from sbp_core.cluster import Link

quick = settings(derandomize=True, deadline=None, max_examples=120)

A, BETA = 2e-6, 1e-9  # α in seconds, β in seconds per byte
FAST = Link(latency_s=A, bytes_per_s=1 / BETA)
SLOW = Link(latency_s=10 * A, bytes_per_s=0.1 / BETA)
ALONE = LinkRates(((FAST, False), (SLOW, False)))
SIZE = 4096
COLLECTIVES = [
    StepKind.ALL_REDUCE,
    StepKind.REDUCE_SCATTER,
    StepKind.ALL_GATHER,
    StepKind.ALL_TO_ALL,
]


def on(nodes: tuple[int, ...], neighbours: int = 1) -> RankGroup:
    return RankGroup((Membership(nodes, neighbours),))


def inside(size: int, neighbours: int = 1) -> RankGroup:
    return on((0,) * size, neighbours)


def sharing(links: LinkRates, *is_shared: bool) -> LinkRates:
    return LinkRates(
        tuple((link, now) for (link, _), now in zip(links.levels, is_shared, strict=True))
    )


def times(
    kind: StepKind, group: RankGroup, links: LinkRates = ALONE, size: int = SIZE
) -> dict[str, float]:
    return {one.name: one.time_s for one in timed_algorithms(kind, group, size, links)}


@pytest.mark.parametrize(
    ("kind", "algorithm", "messages", "moved"),
    [
        (StepKind.ALL_GATHER, "ring", 3, 3 / 4),
        (StepKind.ALL_GATHER, "recursive doubling", 2, 3 / 4),
        (StepKind.REDUCE_SCATTER, "ring", 3, 3 / 4),
        (StepKind.REDUCE_SCATTER, "recursive halving", 2, 3 / 4),
        (StepKind.ALL_REDUCE, "ring", 6, 6 / 4),
        (StepKind.ALL_REDUCE, "recursive doubling", 2, 2),
        (StepKind.ALL_REDUCE, "halving-doubling", 4, 6 / 4),
        (StepKind.ALL_REDUCE, "tree", 4, 2),
        (StepKind.ALL_TO_ALL, "direct", 3, 3 / 16),
        (StepKind.ALL_TO_ALL, "Bruck", 2, 4 / 16),
    ],
)
def test_four_ranks_take_the_times_of_the_literature(
    kind: StepKind, algorithm: str, messages: int, moved: float
) -> None:
    found = times(kind, inside(4))

    assert found[algorithm] == pytest.approx(messages * A + moved * SIZE * BETA)


@pytest.mark.parametrize(
    ("kind", "algorithm", "messages", "moved"),
    [
        (StepKind.ALL_GATHER, "Bruck", 3, 4 / 5),  # 1, 2 and 1 parts of a fifth
        (StepKind.ALL_REDUCE, "ring", 8, 8 / 5),
        (StepKind.ALL_REDUCE, "tree", 6, 2),
        (StepKind.ALL_REDUCE, "recursive doubling", 4, 4),  # two for the fifth rank
        (StepKind.ALL_REDUCE, "halving-doubling", 6, 2 + 6 / 4),
        (StepKind.ALL_TO_ALL, "Bruck", 3, (2 + 2 + 1) / 25),  # parts 1 and 3, 2 and 3, 4
    ],
)
def test_five_ranks_take_the_times_of_the_literature(
    kind: StepKind, algorithm: str, messages: int, moved: float
) -> None:
    found = times(kind, inside(5))

    assert found[algorithm] == pytest.approx(messages * A + moved * SIZE * BETA)


def test_small_messages_take_few_rounds_and_large_ones_few_bytes() -> None:
    small = timed_algorithms(StepKind.ALL_REDUCE, inside(6), 16, ALONE)[0]
    large = timed_algorithms(StepKind.ALL_REDUCE, inside(6), 2**30, ALONE)[0]

    assert small.name == "recursive doubling"
    assert large.name == "ring"


def test_a_ring_crosses_nodes_once_and_wins_where_their_link_is_shared() -> None:
    group = on((0, 0, 1, 1, 2, 2))
    shared = sharing(ALONE, False, True)

    found = times(StepKind.ALL_GATHER, group, shared, 6 * 10**9)

    assert found["ring"] == pytest.approx(5 * (10 * A + 1e9 * 10 * BETA))
    assert found["ring"] < found["Bruck"]


def test_exchanges_across_nodes_divide_a_shared_link() -> None:
    group = on((0, 0, 1, 1))
    shared = sharing(ALONE, False, True)

    apart = times(StepKind.ALL_GATHER, group, ALONE)["recursive doubling"]
    together = times(StepKind.ALL_GATHER, group, shared)["recursive doubling"]

    near = A + SIZE / 4 * BETA
    assert apart == pytest.approx(near + 10 * A + SIZE / 2 * 10 * BETA)
    assert together == pytest.approx(near + 10 * A + 2 * SIZE / 2 * 10 * BETA)


def test_a_hierarchy_reduces_inside_nodes_first() -> None:
    group = on((0, 0, 1, 1))
    shared = sharing(ALONE, False, True)

    found = times(StepKind.ALL_REDUCE, group, shared)["hierarchical"]

    inside_s = A + SIZE / 2 * BETA
    # Two pairs of ranks exchange the halves of a half over one link.
    between_s = 2 * (10 * A + 2 * SIZE / 4 * 10 * BETA)
    doubling_s = 10 * A + 2 * SIZE / 2 * 10 * BETA
    assert found == pytest.approx(2 * inside_s + min(between_s, doubling_s))


def test_a_memory_bus_is_divided_among_all_ranks_of_a_node() -> None:
    bus = sharing(ALONE, True, False)

    found = times(StepKind.ALL_GATHER, inside(4, neighbours=2), bus)["ring"]

    assert found == pytest.approx(3 * (A + 8 * SIZE / 4 * BETA))


def test_direct_messages_of_all_ranks_share_the_link_of_a_node() -> None:
    group = on((0, 0, 1, 1))
    shared = sharing(ALONE, False, True)

    alone = times(StepKind.ALL_TO_ALL, group, shared, 16 * 10**9)["direct"]
    crowded = times(StepKind.ALL_TO_ALL, on((0, 0, 1, 1), 3), shared, 16 * 10**9)["direct"]

    assert alone == pytest.approx(2 * 10 * A + 4 * 1e9 * 10 * BETA)
    assert crowded == pytest.approx(2 * 10 * A + 3 * 4 * 1e9 * 10 * BETA)


def test_one_rank_alone_takes_no_time() -> None:
    assert [timed_algorithms(kind, inside(1), SIZE, ALONE)[0].time_s for kind in COLLECTIVES] == [
        0.0
    ] * 4


groups = st.builds(
    lambda members, neighbours: on(
        tuple(node for node, count in enumerate(members) for _ in range(count)), neighbours
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 4),
)
links = st.builds(
    lambda values, intra_shared, inter_shared: LinkRates(
        (
            (Link(latency_s=values[0], bytes_per_s=values[1]), intra_shared),
            (
                Link(latency_s=values[0] + values[2], bytes_per_s=values[1] * values[3]),
                inter_shared,
            ),
        )
    ),
    st.tuples(st.floats(0, 1e-3), st.floats(1e6, 1e12), st.floats(0, 1e-3), st.floats(1e-3, 1.0)),
    st.booleans(),
    st.booleans(),
)
cases = st.tuples(st.sampled_from(COLLECTIVES), groups, st.integers(0, 2**34), links)


def fastest(kind: StepKind, group: RankGroup, size: int, given: LinkRates) -> float:
    return timed_algorithms(kind, group, size, given)[0].time_s


@quick
@given(cases, st.integers(0, 2**30))
def test_more_bytes_are_never_faster(
    case: tuple[StepKind, RankGroup, int, LinkRates], more: int
) -> None:
    kind, group, size, given_links = case

    assert fastest(kind, group, size + more, given_links) >= (1 - 1e-9) * fastest(*case)


@quick
@given(cases, st.floats(1.0, 100.0), st.booleans())
def test_more_bandwidth_is_never_slower(
    case: tuple[StepKind, RankGroup, int, LinkRates], factor: float, between: bool
) -> None:
    kind, group, size, given_links = case
    levels = list(given_links.levels)
    link, is_shared = levels[between]
    levels[between] = replace(link, bytes_per_s=link.bytes_per_s * factor), is_shared
    better = LinkRates(tuple(levels))

    assert fastest(kind, group, size, better) <= (1 + 1e-9) * fastest(*case)


@quick
@given(cases)
def test_sharing_links_is_never_faster(case: tuple[StepKind, RankGroup, int, LinkRates]) -> None:
    kind, group, size, given_links = case
    alone = sharing(given_links, False, False)
    shared = sharing(given_links, True, True)

    assert fastest(kind, group, size, alone) <= (1 + 1e-9) * fastest(*case)
    assert fastest(*case) <= (1 + 1e-9) * fastest(kind, group, size, shared)


@quick
@given(cases, st.integers(1, 4))
def test_more_groups_at_once_are_never_faster(
    case: tuple[StepKind, RankGroup, int, LinkRates], more: int
) -> None:
    kind, group, size, given_links = case
    (own,) = group.memberships
    crowded = on(own.groups, own.neighbours + more)

    assert fastest(kind, crowded, size, given_links) >= (1 - 1e-9) * fastest(*case)


@quick
@given(cases)
def test_ways_are_told_fastest_first(case: tuple[StepKind, RankGroup, int, LinkRates]) -> None:
    found = [way.time_s for way in timed_algorithms(*case)]

    assert found == sorted(found)
    assert (found[0] > 0) <= (case[1].size > 1)
