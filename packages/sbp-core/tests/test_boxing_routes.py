"""A route as a table: what a reader finds in it."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from sbp_core.boxing import BoxingStep, Route, StepKind, routes
from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.routes import held_bytes, sent_by_rank
from sbp_core.boxing.slices import collective_bytes, sent_bytes, transfer_bytes
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.units import format_bytes

MESH = Placement([[0, 1], [2, 3]], ("data", "tensor"))
CLUSTER = Cluster(
    name="test",
    num_devices=8,
    devices_per_node=8,
    device=Device(memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0),
    intra_node=Link(latency_s=1e-6, bytes_per_s=1e9),
)


def step_of(
    kind: StepKind,
    source: str,
    target: str,
    *,
    axes: tuple[int, ...] = (0,),
    shape: tuple[int, ...] = (400, 100),
    before: Placement = MESH,
    after: Placement | None = None,
) -> BoxingStep:
    made = BoxingStep(
        kind=kind,
        shape=shape,
        dtype="float32",
        source=(before, NdSbp.parse(source)),
        target=(after or before, NdSbp.parse(target)),
        axes=() if kind is StepKind.TRANSFER else axes,
        size_bytes=0,
    )
    counts = transfer_bytes if kind is StepKind.TRANSFER else collective_bytes
    return replace(made, size_bytes=counts(made))


def route_of(*steps: BoxingStep) -> Route:
    first, last = steps[0], steps[-1]
    return Route(
        shape=first.shape,
        dtype=first.dtype,
        source=first.source,
        target=last.target,
        steps=steps,
    )


REDUCE = step_of(StepKind.ALL_REDUCE, "P, S(0)", "B, S(0)")
GATHER = step_of(StepKind.ALL_GATHER, "B, S(0)", "B, B", axes=(1,))


def test_the_example_of_the_docstring_is_what_comes_out() -> None:
    failed, attempted = doctest.testmod(routes)

    assert attempted > 0
    assert failed == 0


def test_a_table_has_a_line_a_step_with_times_and_ways() -> None:
    title, total, header, *rows = route_of(REDUCE, GATHER).explain(CLUSTER).splitlines()

    assert title == "float32[400, 100] (P, S(0)) -> (B, B) on data=2 x tensor=2 (ranks 0-3)"
    assert total.split(" between ranks, ")[0] == "  640.0 kB"
    assert total.endswith(" µs on the links of cluster 'test'")
    assert header.split()[:3] == ["step", "kind", "where"]
    assert [row.split()[:3] for row in rows] == [
        ["1", "all-reduce", "data"],
        ["2", "all-gather", "tensor"],
    ]
    assert all("fastest of" in row for row in rows)


def test_columns_start_at_one_place() -> None:
    _, _, header, *rows = route_of(REDUCE, GATHER).explain().splitlines()

    at = header.index("from -> to")

    assert all(row[at - 1] == " " and row[at] != " " for row in rows)


def test_without_a_cluster_there_are_no_times() -> None:
    text = route_of(REDUCE).explain()

    assert "µs" not in text
    assert "time" not in text


def test_ranks_that_send_alike_are_told_in_one_number() -> None:
    assert sent_by_rank(REDUCE) == format_bytes(sent_bytes(REDUCE, 0)) == "80.0 kB"


def test_few_ranks_that_send_differently_are_listed() -> None:
    uneven = step_of(StepKind.ALL_TO_ALL, "S(0), B", "S(1), B", shape=(3, 1))

    assert sent_by_rank(uneven) == "0: 0 B, 1: 0 B, 2: 4 B, 3: 4 B"


def test_many_ranks_that_send_differently_are_told_by_the_least_and_the_most() -> None:
    uneven = step_of(StepKind.ALL_GATHER, "S(0)", "B", shape=(7, 600), before=Placement.grid((6,)))

    assert sent_by_rank(uneven) == "12.0 kB to 24.0 kB"


@pytest.mark.parametrize(
    "one",
    [
        REDUCE,
        GATHER,
        step_of(StepKind.REDUCE_SCATTER, "P, B", "S(1), B"),
        step_of(StepKind.ALL_TO_ALL, "S(0), B", "S(1), B"),
        step_of(StepKind.ALL_TO_ALL, "S(0), S(0)", "S(1), S(1)", axes=(0, 1)),
        step_of(StepKind.ALL_TO_ALL, "S(0), S(1)", "S(1), S(0)", axes=(0, 1)),
        step_of(StepKind.ALL_REDUCE, "P, P", "B, B", axes=(0, 1), shape=(3, 3)),
        step_of(StepKind.LOCAL, "B, B", "B, S(0)", axes=(1,)),
        step_of(StepKind.LOCAL, "B, S(0)", "B, P", axes=(1,)),
        step_of(StepKind.LOCAL, "B, B", "B, P", axes=(1,)),
        step_of(StepKind.ALL_GATHER, "S(0), B", "B, B", shape=(5, 3)),
        step_of(StepKind.TRANSFER, "S(0), B", "B, S(0)"),
    ],
    ids=str,
)
def test_short_cuts_tell_what_a_look_at_every_rank_tells(one: BoxingStep) -> None:
    sizes = {sent_bytes(one, rank) for rank in MESH.rank_list}

    assert held_bytes(one) == max(step_memory_bytes(one).values())
    if len(sizes) == 1:
        assert sent_by_rank(one) == (format_bytes(*sizes) if one.size_bytes else "-")
    else:
        assert ": " in sent_by_rank(one)


def test_a_transfer_names_both_rank_sets() -> None:
    moved = step_of(StepKind.TRANSFER, "B, B", "S(0)", after=Placement([4, 5, 7], ("pipe",)))

    text = route_of(moved).explain(CLUSTER)

    assert "(B, B) on data=2 x tensor=2 (ranks 0-3) -> (S(0)) on pipe=3 (ranks 4-5,7)" in text
    assert "ranks 0-3 -> 4-5,7" in text


def test_a_route_without_steps_says_so() -> None:
    here = REDUCE.source
    stays = Route(shape=(4,), dtype="float32", source=here, target=here, steps=())

    assert stays.explain(CLUSTER).endswith("\n  nothing to do")
