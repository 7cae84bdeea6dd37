"""Conversions with the same answer pose the same problem."""

from __future__ import annotations

import pytest

from sbp_core.boxing import route
from sbp_core.boxing.routing.canonical_problem import pose_problem
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

MESH = Placement.grid((2, 2), ("data", "tensor"))
ELSEWHERE = Placement([[7, 4], [5, 9]], ("a", "b"))


def ends(source: str, target: str, before: Placement = MESH, after: Placement | None = None):
    return (before, NdSbp.parse(source)), (after or before, NdSbp.parse(target))


def test_ranks_axis_names_and_even_extents_do_not_matter() -> None:
    one, _ = pose_problem((8, 4), *ends("S(0), P", "B, S(1)"))
    other, _ = pose_problem((64, 12), *ends("S(0), P", "B, S(1)", ELSEWHERE))

    assert one == other


def test_dims_of_even_splits_are_numbered_as_they_appear() -> None:
    one, _ = pose_problem((8, 8, 8), *ends("S(0), B", "S(1), B"))
    other, naming = pose_problem((8, 8, 8), *ends("S(2), B", "S(0), B"))

    assert one == other
    assert naming.sbp(other.source) == NdSbp.parse("S(2), B")
    assert naming.sbp(other.target) == NdSbp.parse("S(0), B")


def test_dims_of_uneven_splits_keep_their_extents() -> None:
    one, _ = pose_problem((8, 7), *ends("S(0), B", "S(1), B"))
    other, _ = pose_problem((8, 7), *ends("S(1), B", "S(0), B"))

    assert one != other
    assert one.sizes.extents == (8, 7)


def test_max_and_min_are_alike_but_not_a_sum() -> None:
    largest, _ = pose_problem((8, 8), *ends("P(max), P(min)", "B, B"))
    smallest, naming = pose_problem((8, 8), *ends("P(min), P(max)", "B, B"))
    total, _ = pose_problem((8, 8), *ends("P, P(max)", "B, B"))

    assert largest == smallest != total
    assert naming.sbp(smallest.source) == NdSbp.parse("P(min), P(max)")


def test_two_placements_are_told_by_the_ranks_that_they_share() -> None:
    apart, _ = pose_problem((8, 8), *ends("S(0), B", "B, B", MESH, Placement([[4, 5], [6, 7]])))
    further, _ = pose_problem((8, 8), *ends("S(0), B", "B, B", MESH, Placement([[8, 5], [6, 4]])))
    common, _ = pose_problem((8, 8), *ends("S(0), B", "B, B", MESH, Placement([[4, 0], [6, 7]])))

    assert apart == further != common
    assert common.shared == ((0, 1),)
    assert common.meshes[1] is not None


@pytest.mark.parametrize("shape", [(16, 8), (5, 3), (0, 4), (3,), ()])
def test_bytes_are_those_of_the_tensor(shape: tuple[int, ...]) -> None:
    volume = 1
    for extent in shape:
        volume *= extent

    found = route(shape, "int64", *ends("P, B", "B, B"))

    # An element is added up on one rank of each pair, and sent back, or from there to the others.
    assert found.bytes == 4 * volume * 8


def test_a_mesh_of_many_axes_is_searched_among_fewer_states() -> None:
    mesh = Placement.grid((2,) * 8)
    source, target = "S(0), " * 4 + "P, P, B, B", "B, B, S(0), S(1), " + "B, " * 4

    problem, _ = pose_problem((256, 256, 256), *ends(source.strip(", "), target.strip(", "), mesh))

    entries = problem.meshes[0][1]
    states = 1
    for axis in entries:
        states *= len(axis)
    assert states <= 7000
    assert all(code in axis for axis, code in zip(entries, problem.source, strict=True))
    assert all(code in axis for axis, code in zip(entries, problem.target, strict=True))
