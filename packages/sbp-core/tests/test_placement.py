"""Meshes of ranks, and the machine they stand on."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.serialize import dump, load

quick = settings(derandomize=True, deadline=None, max_examples=80)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A mesh of one to three axes over distinct ranks in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    grid = Placement.grid(shape)
    ranks = draw(st.permutations(range(grid.size + 2)))
    flat = iter(ranks)

    def build(extents: list[int]) -> object:
        return next(flat) if not extents else [build(extents[1:]) for _ in range(extents[0])]

    return Placement(build(shape), device=draw(st.sampled_from(["cpu", "cuda"])))  # type: ignore[arg-type]


def cluster(num_devices: int = 8, devices_per_node: int = 4) -> Cluster:
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device=Device(memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0),
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e10),
        inter_node=Link(latency_s=1e-5, bytes_per_s=1e9),
    )


@quick
@given(placements())
def test_coordinates_and_ranks_are_inverse(placement: Placement) -> None:
    for rank, at in placement.coordinates():
        assert placement.coordinate(rank) == at
        assert placement.rank_at(at) == rank
        assert rank in placement


@quick
@given(placements())
def test_the_groups_of_an_axis_partition_the_ranks(placement: Placement) -> None:
    for axis, extent in enumerate(placement.mesh_shape):
        groups = placement.groups(axis)

        assert sorted(rank for group in groups for rank in group) == sorted(placement.rank_list)
        for group in groups:
            assert len(group) == extent
            for index, rank in enumerate(group):
                assert placement.coordinate(rank)[axis] == index
                assert placement.group(rank, axis) == group


@quick
@given(placements())
def test_submeshes_of_an_axis_partition_the_ranks(placement: Placement) -> None:
    for axis, extent in enumerate(placement.mesh_shape):
        parts = [placement.submesh(axis, index) for index in range(extent)]

        assert sorted(rank for part in parts for rank in part.rank_list) == sorted(
            placement.rank_list
        )
        for index, part in enumerate(parts):
            assert all(placement.coordinate(rank)[axis] == index for rank in part.rank_list)
            assert part.axes == (placement.axes[:axis] + placement.axes[axis + 1 :] or ("rank",))


@quick
@given(placements())
def test_placements_survive_text_json_and_pickling(placement: Placement) -> None:
    assert eval(repr(placement), {"Placement": Placement}) == placement
    assert load(json.loads(json.dumps(dump(placement, Placement))), Placement) == placement
    restored = pickle.loads(pickle.dumps(placement))
    assert restored == placement
    assert hash(restored) == hash(placement)


def test_a_grid_numbers_its_ranks_row_by_row() -> None:
    mesh = Placement.grid((2, 3), ("data", "tensor"))

    assert mesh.ranks == [[0, 1, 2], [3, 4, 5]]
    assert mesh.size == 6
    assert mesh.num_axes == 2
    assert mesh.group(4, 0) == (1, 4)
    assert mesh.group(4, 1) == (3, 4, 5)
    assert mesh.submesh(0, 1).ranks == [3, 4, 5]


@pytest.mark.parametrize(
    ("ranks", "axes", "message"),
    [
        ([[0, 1], [2]], None, "no rectangular mesh"),
        ([], None, "no rectangular mesh"),
        ([0, 0], None, "repeat or are negative"),
        ([0, -1], None, "repeat or are negative"),
        ([0, 1], ("a", "b"), "do not name the 1 axes"),
        ([[0], [1]], ("a", "a"), "do not name the 2 axes"),
    ],
)
def test_what_is_no_mesh_is_refused(
    ranks: list[object], axes: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(SbpValueError, match=message):
        Placement(ranks, axes)  # type: ignore[arg-type]


def test_a_rank_outside_the_mesh_has_no_coordinate() -> None:
    with pytest.raises(SbpValueError, match=r"rank 5 is not in the mesh \[0, 1\]"):
        Placement([0, 1]).coordinate(5)


def test_a_link_inside_a_node_is_not_the_one_between_nodes() -> None:
    machine = cluster(devices_per_node=4)

    assert machine.link((0, 3)) is machine.intra_node
    assert machine.link((3, 4)) is machine.inter_node
    assert machine.link(()) is machine.intra_node


def test_rates_that_cannot_be_are_refused() -> None:
    with pytest.raises(SbpValueError, match="positive memory and rates"):
        Device(memory_bytes=1, flop_per_s={}, memory_bytes_per_s=1.0)
    with pytest.raises(SbpValueError, match="bandwidth > 0"):
        Link(latency_s=0.0, bytes_per_s=0.0)
    with pytest.raises(SbpValueError, match="at least one device"):
        cluster(num_devices=0)
