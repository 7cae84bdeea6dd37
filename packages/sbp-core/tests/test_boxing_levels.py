"""Prices on trees of links of any depth: what each level adds, and laws for all trees."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.boxing.algorithms import LinkRates, timed_algorithms
from sbp_core.boxing.price import _calls, step_time, step_time_s
from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster, Device, Link, LinkLevel
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

quick = settings(derandomize=True, deadline=None, max_examples=60)

FAST = Link(latency_s=1e-6, bytes_per_s=1e10)
MIDDLE = Link(latency_s=1e-5, bytes_per_s=1e9)
SLOW = Link(latency_s=1e-4, bytes_per_s=1e8)
SIZE = 16 * 16 * 4
ENDS = {
    StepKind.ALL_REDUCE: ("P", "B"),
    StepKind.REDUCE_SCATTER: ("P", "S(0)"),
    StepKind.ALL_GATHER: ("S(0)", "B"),
    StepKind.ALL_TO_ALL: ("S(0)", "S(1)"),
}


def tree(
    groups: tuple[LinkLevel, ...] = (),
    *,
    devices_per_node: int = 2,
    intra: Link = FAST,
    inter: Link = MIDDLE,
    intra_shared: bool = False,
    inter_shared: bool = True,
) -> Cluster:
    return Cluster(
        name="tree",
        num_devices=64,
        devices_per_node=devices_per_node,
        device=Device(memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0),
        intra_node=intra,
        inter_node=inter,
        intra_node_shared=intra_shared,
        inter_node_shared=inter_shared,
        groups=groups,
    )


def collective(kind: StepKind, mesh: Placement, axis: int = 0) -> BoxingStep:
    source, target = (
        NdSbp.parse(", ".join(end if at == axis else "B" for at in range(mesh.num_axes)))
        for end in ENDS[kind]
    )
    return BoxingStep(
        kind=kind,
        shape=(16, 16),
        dtype="float32",
        source=(mesh, source),
        target=(mesh, target),
        axes=(axis,),
        size_bytes=0,
    )


def copies(senders: list[int], receivers: list[int]) -> BoxingStep:
    """Return the transfer of whole copies."""
    whole = NdSbp.parse("B")
    return BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(16, 16),
        dtype="float32",
        source=(Placement(senders), whole),
        target=(Placement(receivers), whole),
        axes=(),
        size_bytes=0,
    )


#: Nodes of two in racks of four: between nodes of a rack `MIDDLE`, between racks `SLOW`.
RACKS = tree((LinkLevel(name="rack", num_ranks=4, link=MIDDLE, shared=True),), inter=SLOW)


@pytest.mark.parametrize(("receiver", "link"), [(1, FAST), (2, MIDDLE), (4, SLOW)])
def test_a_message_takes_the_link_of_the_smallest_group_that_holds_both_ends(
    receiver: int, link: Link
) -> None:
    assert RACKS.link([0, receiver]) is link
    assert step_time_s(copies([0], [receiver]), RACKS) == pytest.approx(
        link.latency_s + SIZE / link.bytes_per_s
    )


def test_ranks_of_a_rack_divide_its_link_to_the_others() -> None:
    found = step_time(copies([0, 1, 2, 3], [4, 6, 8, 10]), RACKS)

    assert found.time_s == pytest.approx(SLOW.latency_s + 4 * SIZE / SLOW.bytes_per_s)
    assert found.reason == "the busiest shared link"


def test_what_leaves_a_rack_takes_its_turn_on_the_links_of_the_nodes_too() -> None:
    wide = replace(RACKS, inter_node=replace(SLOW, bytes_per_s=1e12))
    step = copies([0, 1], [4, 6])

    # Two messages leave node 0 over one link; that of the rack is wide.
    assert wide.link([0, 4]) == Link(latency_s=SLOW.latency_s, bytes_per_s=MIDDLE.bytes_per_s)
    assert step_time_s(step, wide) == pytest.approx(SLOW.latency_s + 2 * SIZE / MIDDLE.bytes_per_s)


def test_groups_of_a_collective_divide_the_link_of_every_level() -> None:
    # Pairs {0 4} {1 5} {2 6} {3 7}: all four cross from one rack to the other.
    mesh = Placement([[0, 1, 2, 3], [4, 5, 6, 7]])
    one = collective(StepKind.ALL_GATHER, Placement([0, 4]))

    assert step_time_s(one, RACKS) == pytest.approx(SLOW.latency_s + SIZE / 2 / SLOW.bytes_per_s)
    assert step_time_s(collective(StepKind.ALL_GATHER, mesh), RACKS) == pytest.approx(
        SLOW.latency_s + 4 * SIZE / 2 / SLOW.bytes_per_s
    )


def test_a_hierarchy_of_three_levels_sends_least_over_the_slowest() -> None:
    found = step_time(collective(StepKind.ALL_GATHER, Placement.grid((8,))), RACKS)
    # Between racks four pairs exchange what a rank has; then pairs of nodes, in each of two
    # racks, what two have; then pairs of ranks what four have.
    between_racks = SLOW.latency_s + 4 * SIZE / 8 / SLOW.bytes_per_s
    between_nodes = MIDDLE.latency_s + 2 * 2 * SIZE / 8 / MIDDLE.bytes_per_s
    inside = FAST.latency_s + 4 * SIZE / 8 / FAST.bytes_per_s

    assert found.algorithm == "hierarchical"
    assert found.time_s == pytest.approx(between_racks + between_nodes + inside)


def test_direct_messages_to_other_racks_take_their_turn_on_the_link_of_their_node() -> None:
    wide = replace(RACKS, inter_node=replace(SLOW, bytes_per_s=1e12))
    [(group, _)] = _calls(collective(StepKind.ALL_TO_ALL, Placement.grid((8,))), wide.group_sizes)
    size = 64 * 10**9

    found = timed_algorithms(StepKind.ALL_TO_ALL, group, size, LinkRates.of(wide))
    times = {one.name: one.time_s for one in found}

    # Each rank sends 2 messages of a 64th to the other node of its rack, and 4 to the other rack.
    node_s = 2 * size / 64 / MIDDLE.bytes_per_s
    assert times["direct"] == pytest.approx(
        2 * (MIDDLE.latency_s + node_s) + 4 * (SLOW.latency_s + node_s)
    )


def test_calibrations_count_nodes_whatever_lies_inside_them() -> None:
    samples = [
        Measurement(
            backend="torch",
            kind=kind,
            group_size=2,
            num_nodes=nodes,
            shared_bytes=size,
            times_s=(nodes * 1e-3 + 1e-6 * size,),
        )
        for kind in ("all-gather", "transfer")
        for nodes in (1, 2)
        for size in (64, 4096)
    ]
    pairs = (LinkLevel(name="socket", num_ranks=2, link=FAST),)
    cluster = replace(
        tree(pairs, devices_per_node=4), calibrations={"torch": Calibration.of(samples)}
    )

    for step in (collective(StepKind.ALL_GATHER, Placement([1, 2])), copies([1], [2])):
        assert step_time_s(step, cluster) == pytest.approx(1e-3 + 1e-6 * SIZE)
    for step in (collective(StepKind.ALL_GATHER, Placement([3, 4])), copies([3], [4])):
        assert step_time_s(step, cluster) == pytest.approx(2e-3 + 1e-6 * SIZE)


links = st.builds(
    Link, latency_s=st.sampled_from([0.0, 1e-6, 3e-4]), bytes_per_s=st.floats(1e6, 1e12)
)


@st.composite
def steps(draw: st.DrawFn) -> BoxingStep:
    num_ranks = 24
    if draw(st.booleans()):
        ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=5, unique=True)
        return copies(draw(ranks), draw(ranks))
    shape = draw(st.sampled_from([(2,), (6,), (8,), (2, 4), (3, 4), (2, 2, 2), (4, 6)]))
    axis = draw(st.integers(0, len(shape) - 1))
    mesh = Placement.grid(shape)
    if draw(st.booleans()):
        flat = iter(draw(st.permutations(range(num_ranks)))[: mesh.size])

        def build(extents: tuple[int, ...]) -> object:
            return next(flat) if not extents else [build(extents[1:]) for _ in range(extents[0])]

        mesh = Placement(build(shape))  # type: ignore[arg-type] # lists of lists of ranks
    return collective(draw(st.sampled_from([*ENDS])), mesh, axis)


@st.composite
def trees(draw: st.DrawFn) -> Cluster:
    sizes = draw(st.sampled_from([(2, 4), (2, 6, 12), (4, 8), (2, 4, 8), (1, 3, 6), (3, 6, 12)]))
    node = draw(st.integers(0, len(sizes) - 1))
    return tree(
        tuple(
            LinkLevel(
                name=f"of {size}", num_ranks=size, link=draw(links), shared=draw(st.booleans())
            )
            for index, size in enumerate(sizes)
            if index != node
        ),
        devices_per_node=sizes[node],
        intra=draw(links),
        inter=draw(links),
        intra_shared=draw(st.booleans()),
        inter_shared=draw(st.booleans()),
    )


@quick
@given(st.sampled_from([*ENDS, StepKind.TRANSFER]), trees(), st.randoms(use_true_random=False))
def test_what_lies_in_a_group_of_the_second_level_is_priced_by_two_levels(
    kind: StepKind, whole: Cluster, random: Random
) -> None:
    first, second, *_ = whole.levels
    ranks = random.sample(range(second.num_ranks), second.num_ranks)
    half = len(ranks) // 2
    is_transfer = kind is StepKind.TRANSFER
    step = copies(ranks[:half], ranks[half:]) if is_transfer else collective(kind, Placement(ranks))
    two = tree(
        devices_per_node=first.num_ranks,
        intra=first.link,
        inter=second.link,
        intra_shared=first.shared,
        inter_shared=second.shared,
    )

    assert step_time_s(step, whole) == step_time_s(step, two)


@quick
@given(steps(), trees(), st.floats(1.0, 100.0), st.integers(0, 3))
def test_a_faster_link_at_any_level_is_never_slower(
    step: BoxingStep, slower: Cluster, factor: float, which: int
) -> None:
    level = slower.levels[which % len(slower.levels)]
    link = replace(
        level.link,
        bytes_per_s=level.link.bytes_per_s * factor,
        latency_s=level.link.latency_s / factor,
    )
    if level.name == "node":
        faster = replace(slower, intra_node=link)
    elif level.name == "cluster":
        faster = replace(slower, inter_node=link)
    else:
        groups = [replace(one, link=link) if one == level else one for one in slower.groups]
        faster = replace(slower, groups=tuple(groups))

    assert step_time_s(step, faster) <= (1 + 1e-9) * step_time_s(step, slower)


@quick
@given(steps(), trees())
def test_sharing_is_never_faster(step: BoxingStep, given_tree: Cluster) -> None:
    def sharing(shared: bool) -> Cluster:
        groups = tuple(replace(one, shared=shared) for one in given_tree.groups)
        return replace(
            given_tree, groups=groups, intra_node_shared=shared, inter_node_shared=shared
        )

    alone_s, given_s, shared_s = (
        step_time_s(step, one) for one in (sharing(False), given_tree, sharing(True))
    )

    assert alone_s <= (1 + 1e-9) * given_s
    assert given_s <= (1 + 1e-9) * shared_s


@quick
@given(steps(), links, links, st.booleans(), st.booleans())
def test_a_boundary_that_slows_nothing_slows_no_algorithm(
    step: BoxingStep, intra: Link, inter: Link, shared: bool, inside: bool
) -> None:
    shallow = tree(devices_per_node=4, intra=intra, inter=inter, inter_shared=shared)
    if inside:
        # What leaves a node passes the boundary, too.
        assume(inter.bytes_per_s <= intra.bytes_per_s)
        deep = replace(shallow, groups=(LinkLevel(name="socket", num_ranks=2, link=intra),))
    else:
        # The nodes of a rack share their links as before; racks have all the links they need.
        rack = LinkLevel(name="rack", num_ranks=8, link=inter, shared=shared)
        deep = replace(shallow, groups=(rack,), inter_node_shared=False)

    if step.kind is StepKind.TRANSFER:
        assert step_time_s(step, deep) == pytest.approx(step_time_s(step, shallow), rel=1e-12)
        return
    shallow_calls, deep_calls = (_calls(step, one.group_sizes) for one in (shallow, deep))
    # One call with the same ranks and bytes may lie in several ways in the deeper tree.
    slowest = []
    for calls, cluster in ((shallow_calls, shallow), (deep_calls, deep)):
        times: dict[str, float] = {}
        for group, size in calls:
            for one in timed_algorithms(step.kind, group, size, LinkRates.of(cluster)):
                times[one.name] = max(times.get(one.name, 0.0), one.time_s)
        slowest.append(times)
    before, after = slowest
    # A boundary gives one more hierarchy to choose; all other algorithms take what they took.
    for times in slowest:
        times.pop("hierarchical", None)
    assert after == pytest.approx(before, rel=1e-12)
    assert step_time_s(step, deep) <= (1 + 1e-12) * step_time_s(step, shallow)
