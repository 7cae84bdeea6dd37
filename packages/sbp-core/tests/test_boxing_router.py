"""Routes: the published table of bytes, the traps of nested splits, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from sbp_core.boxing import Route, StepKind, conversion_bytes, route
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp

SHAPE = (24, 24)
T = 24 * 24 * 4


def between(
    source: Sbp, target: Sbp, ranks: tuple[int, ...], others: tuple[int, ...] | None = None
) -> Route:
    before = Placement(list(ranks), ("x",))
    after = before if others is None else Placement(list(others), ("x",))
    return route(SHAPE, "float32", (before, NdSbp(source)), (after, NdSbp(target)))


def on_mesh(source: str, target: str, shape: tuple[int, ...] = SHAPE) -> Route:
    mesh = Placement([[0, 1], [2, 3]], ("data", "tensor"))
    return route(shape, "float32", (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target)))


def kinds(found: Route) -> list[StepKind]:
    return [step.kind for step in found.steps]


# from, to, bytes on the same ranks / T, bytes between disjoint ranks / T; p1 and p2 ranks.
TABLE = [
    (S(0), S(0), lambda p1: 0, lambda p1, p2: 1),
    (S(0), S(1), lambda p1: Fraction(p1 - 1, p1), lambda p1, p2: 1),
    (S(1), B, lambda p1: p1 - 1, lambda p1, p2: p2),
    (S(1), P, lambda p1: 0, lambda p1, p2: 1),
    (B, S(0), lambda p1: 0, lambda p1, p2: 1),
    (B, B, lambda p1: 0, lambda p1, p2: p2),
    (B, P, lambda p1: 0, lambda p1, p2: 1),
    (P, S(0), lambda p1: p1 - 1, lambda p1, p2: p1),
    (P, B, lambda p1: 2 * (p1 - 1), lambda p1, p2: p1 + p2 - 1),
    (P, P, lambda p1: 0, lambda p1, p2: p1),
]


@pytest.mark.parametrize(("source", "target", "same", "disjoint"), TABLE)
@pytest.mark.parametrize("p1", [2, 3, 4])
@pytest.mark.parametrize("p2", [1, 2, 3, 4])
def test_even_1d_bytes_are_those_of_the_published_table(
    source: Sbp, target: Sbp, same, disjoint, p1: int, p2: int
) -> None:
    ranks, others = tuple(range(p1)), tuple(range(p1, p1 + p2))

    assert between(source, target, ranks).bytes == same(p1) * T
    assert between(source, target, ranks, others).bytes == disjoint(p1, p2) * T


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (P, B, StepKind.ALL_REDUCE),
        (P, S(1), StepKind.REDUCE_SCATTER),
        (S(0), B, StepKind.ALL_GATHER),
        (S(0), S(1), StepKind.ALL_TO_ALL),
        (B, S(0), StepKind.LOCAL),
        (B, P, StepKind.LOCAL),
        (S(0), P, StepKind.LOCAL),
        (B, P("max"), StepKind.LOCAL),
        (P("min"), B, StepKind.ALL_REDUCE),
    ],
)
def test_each_1d_pair_is_one_primitive(source: Sbp, target: Sbp, kind: StepKind) -> None:
    assert kinds(between(source, target, (0, 1, 2))) == [kind]


def test_a_slice_becomes_a_partial_maximum_only_through_the_whole() -> None:
    found = between(S(0), P("max"), (0, 1))

    assert kinds(found) == [StepKind.ALL_GATHER, StepKind.LOCAL]


def test_one_partial_becomes_another_only_through_the_value() -> None:
    found = between(P, P("max"), (0, 1))

    assert kinds(found) == [StepKind.ALL_REDUCE, StepKind.LOCAL]


def test_the_same_state_needs_no_step() -> None:
    found = on_mesh("S(0), P", "S(0), P")

    assert found.steps == ()
    assert found.bytes == 0
    assert "nothing to do" in str(found)


def test_gathering_an_outer_split_under_an_inner_one_is_no_plain_all_gather() -> None:
    found = on_mesh("S(0), S(0)", "B, S(0)")

    # Rank (0, 0) holds quarter 0 and needs half 0: quarter 1, which its group has not.
    assert kinds(found) == [StepKind.TRANSFER]
    assert found.bytes == 3 * T // 2


def test_gathering_the_inner_split_is_a_plain_all_gather() -> None:
    assert kinds(on_mesh("S(0), S(0)", "S(0), B")) == [StepKind.ALL_GATHER]


def test_an_outer_split_over_an_inner_one_is_no_plain_slice() -> None:
    found = on_mesh("B, S(0)", "S(0), S(0)")

    assert kinds(found) == [StepKind.TRANSFER]
    assert found.bytes == T // 2


def test_collectives_go_before_a_transfer_of_as_many_bytes() -> None:
    found = on_mesh("S(0), S(1)", "B, S(1)")

    assert kinds(found) == [StepKind.ALL_GATHER]
    assert found.bytes == T


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("P, P", "S(0), S(1)", StepKind.REDUCE_SCATTER),
        ("P(max), P(max)", "S(0), S(0)", StepKind.REDUCE_SCATTER),
        ("S(0), S(1)", "B, B", StepKind.ALL_GATHER),
        ("S(0), S(0)", "B, B", StepKind.ALL_GATHER),
        ("S(0), S(1)", "S(1), S(0)", StepKind.ALL_TO_ALL),
        ("S(0), S(0)", "S(1), S(1)", StepKind.ALL_TO_ALL),
    ],
)
def test_what_two_axes_do_alike_is_one_collective(source: str, target: str, kind: StepKind) -> None:
    found = on_mesh(source, target)

    assert kinds(found) == [kind]
    assert found.steps[0].axes == (0, 1)


def test_a_sum_too_small_to_cut_is_all_reduced_on_both_axes_at_once() -> None:
    found = on_mesh("P, P", "B, B", ())

    assert kinds(found) == [StepKind.ALL_REDUCE]
    assert found.steps[0].axes == (0, 1)


def test_a_sum_over_two_axes_goes_in_parts() -> None:
    found = on_mesh("P, P", "B, B")

    # Two all-reduces of the whole would move 8 T.
    assert found.bytes == 6 * T
    assert StepKind.TRANSFER not in kinds(found)


def test_partials_of_two_reductions_are_reduced_from_the_inner_axis() -> None:
    found = on_mesh("P, P(max)", "B, B")

    assert found.steps[0].axes == (1,)
    reduced = [step for step in found.steps if step.source[1][0] == P != step.target[1][0]]
    assert all(step.source[1][1] != P("max") for step in reduced)


def test_uneven_and_empty_shards_are_counted_exactly() -> None:
    mesh = Placement.grid((4,), ("x",))

    gather = route((2, 3), "int64", (mesh, NdSbp(S(0))), (mesh, NdSbp(B)))
    exchange = route((5, 2), "int64", (mesh, NdSbp(S(0))), (mesh, NdSbp(S(1))))

    # Four ranks need 6 elements each; two of them hold 3 of those, two none.
    assert gather.bytes == (4 * 6 - 2 * 3) * 8
    # Ranks 0 and 1 want one column (5) each and hold 2 rows and 1 row of it.
    assert exchange.bytes == (5 - 2 + 5 - 1) * 8


def test_overlapping_ranks_keep_what_they_have() -> None:
    found = between(S(0), S(0), (0, 1), (1, 2))

    # Rank 1 holds half 1 and needs half 0; rank 2 needs half 1.
    assert found.bytes == T
    assert between(S(0), S(0), (0, 1), (0, 2)).bytes == T // 2


@pytest.mark.parametrize(
    ("source", "ranks", "others"),
    [(S(0), (0, 1), (0, 1, 2)), (B, (1,), (0, 1)), (P, (1, 0), (0, 1))],
)
def test_partial_sums_are_made_where_the_values_are(
    source: Sbp, ranks: tuple[int, ...], others: tuple[int, ...]
) -> None:
    assert between(source, P, ranks, others).bytes == 0


def test_another_mesh_over_the_same_ranks_moves_nothing_if_slices_agree() -> None:
    mesh, line = Placement.grid((2, 2)), Placement.grid((4,))

    found = route(SHAPE, "float32", (mesh, NdSbp(S(0), S(0))), (line, NdSbp(S(0))))

    assert kinds(found) == [StepKind.TRANSFER]
    assert found.bytes == 0


def test_axes_of_one_rank_cost_nothing() -> None:
    mesh = Placement.grid((1, 2))

    found = route(SHAPE, "float32", (mesh, NdSbp(P, S(0))), (mesh, NdSbp(S(0), S(0))))

    assert kinds(found) == [StepKind.LOCAL]
    assert found.bytes == 0


def test_a_mesh_of_too_many_axes_to_search_is_refused() -> None:
    mesh = Placement.grid((2,) * 6)
    splits = NdSbp(*[S(0)] * 6), NdSbp(*[S(1)] * 6)

    with pytest.raises(
        SbpValueError, match=r"too many intermediate states(?s:.*)fewer mesh axes at once"
    ):
        route((64, 64), "float32", (mesh, splits[0]), (mesh, splits[1]))

    between = NdSbp(*[S(1)] * 3, *[S(0)] * 3)
    assert route((64, 64), "float32", (mesh, splits[0]), (mesh, between)).steps


def test_scalars_can_be_routed() -> None:
    before, after = Placement([0, 1, 2]), Placement([3, 4])

    found = route((), "float32", (before, NdSbp(P)), (after, NdSbp(B)))

    assert found.steps[-1].target == (after, NdSbp(B))
    assert 0 < found.bytes <= 6 * 4


def test_a_route_prints_one_line_a_step() -> None:
    lines = str(on_mesh("S(0), B", "B, S(1)", (4096, 1024))).splitlines()

    assert lines == [
        "float32[4096, 1024] (S(0), B) -> (B, S(1)): 16.8 MB",
        "  local on axis 'tensor': (S(0), B) -> (S(0), S(1)), 0 B",
        "  all-gather on axis 'data': (S(0), S(1)) -> (B, S(1)), 16.8 MB",
    ]


def test_lists_are_as_good_as_tuples() -> None:
    mesh = Placement.grid((2,))
    state, whole = (mesh, NdSbp(S(0))), (mesh, NdSbp(B))

    assert route([4, 4], "float32", state, whole) is route((4, 4), "float32", state, whole)
    assert conversion_bytes([4, 4], "float32", mesh, NdSbp(S(0)), NdSbp(B)) == 64
    assert conversion_bytes([4, 4], "float32", mesh, NdSbp(B), NdSbp(B)) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "sbp", "message"),
    [
        ((4,), "float31", NdSbp(B), "no dtype is called 'float31'"),
        ((4,), "float32", NdSbp(S(1)), "does not have"),
        ((4,), "float32", NdSbp(B, B), "2 entries for a mesh of 1 axes"),
        ((4,), "bool", NdSbp(P), "bool values have no P"),
        ((4,), "complex64", NdSbp(P("max")), "cannot be ordered"),
    ],
)
def test_what_cannot_be_is_refused(
    shape: tuple[int, ...], dtype: str, sbp: NdSbp, message: str
) -> None:
    mesh = Placement.grid((2,))

    with pytest.raises(SbpValueError, match=message):
        route(shape, dtype, (mesh, sbp), (mesh, NdSbp(B)))


@pytest.mark.timeout(120)
def test_routing_a_large_mesh_takes_no_long_search() -> None:
    mesh = Placement.grid((4, 16, 16))

    wanted = NdSbp(S(0), B, S(1))
    found = route((4096, 4096), "bfloat16", (mesh, NdSbp(P, S(0), B)), (mesh, wanted))

    # Each axis changes, and none is changed twice.
    assert 0 < len(found.steps) <= 3


def test_boxing_imports_no_torch() -> None:
    code = (
        "import sys; import sbp_core.boxing, sbp_core.boxing.price;"
        " sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
