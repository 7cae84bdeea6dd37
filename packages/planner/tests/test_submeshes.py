"""The parts of a machine that stages may have."""

from dataclasses import replace

import pytest

from sbp_core.cluster import Cluster, LinkLevel
from sbp_core.placement import Placement
from sbp_planner.submeshes import (
    is_submesh,
    link_class,
    logical_shapes,
    stage_ranks,
    submesh,
    submesh_sizes,
)

MACHINE = replace(Cluster.nominal(16), devices_per_node=4)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [(16, (1, 2, 4, 8, 12, 16)), (4, (1, 2, 4)), (3, (1, 2, 3)), (6, (1, 2, 4, 6)), (1, (1,))],
)
def test_sizes_are_powers_of_two_in_a_node_whole_nodes_and_all(num_ranks, sizes):
    assert submesh_sizes(MACHINE, num_ranks) == sizes


def test_a_submesh_is_inside_a_node_or_whole_nodes():
    assert is_submesh(MACHINE, (1, 2))
    assert not is_submesh(MACHINE, (3, 4)), "one rank of each of two nodes"
    assert is_submesh(MACHINE, tuple(range(4, 12)))
    assert not is_submesh(MACHINE, tuple(range(2, 10)))


def test_ranks_that_lie_alike_have_one_class():
    sockets = replace(
        MACHINE, groups=(LinkLevel(name="socket", num_ranks=2, link=MACHINE.intra_node),)
    )

    assert link_class(MACHINE, (0, 1)) == link_class(MACHINE, (5, 6))
    assert link_class(sockets, (0, 1)) == link_class(sockets, (6, 7))
    assert link_class(sockets, (0, 1)) != link_class(sockets, (1, 2))
    assert link_class(MACHINE, (2, 3, 4)) != link_class(MACHINE, (3, 4, 5))


def test_logical_shapes_are_all_products_of_two():
    assert list(logical_shapes(8)) == [(8, 1), (4, 2), (2, 4)]
    assert list(logical_shapes(3)) == [(3, 1)]
    assert list(logical_shapes(1)) == [(1, 1)]


def test_a_submesh_has_successive_ranks_its_last_axis_of_neighbours():
    mesh = Placement.grid((8,), ("data",))

    assert submesh(mesh, 4, (2, 2), ("data", "tensor")).ranks == [[4, 5], [6, 7]]


def test_what_is_beside_a_stage_has_its_shape_if_there_are_as_many_ranks():
    mesh = Placement.grid((8,), ("data",))

    found = stage_ranks(mesh, 2, (2, 2), ("data", "tensor"))

    assert found.own.rank_list == (2, 3, 4, 5)
    assert found.before.mesh_shape == (2, 1), "two ranks are before it, of four"
    assert found.after.rank_list == (6, 7)
    first = stage_ranks(mesh, 0, (2, 1), ("data", "tensor"))
    assert first.before is None
    assert first.after.rank_list == (2, 3)
