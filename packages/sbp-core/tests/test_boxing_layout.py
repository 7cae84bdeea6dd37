"""States as rows of integers, and the slices they mean."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sbp_core.boxing.routing.layout import (
    BROADCAST,
    MAX,
    MIN,
    SUM,
    Layout,
    coordinates,
    covers,
    decode,
    encode,
    intervals,
    num_ranks,
    numbers,
)
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, all_entries, local_bounds


def test_a_code_stands_for_one_entry() -> None:
    entries = all_entries(3, ("sum", "max", "min"))

    codes = [encode(entry) for entry in entries]

    assert codes == [0, 1, 2, BROADCAST, SUM, MAX, MIN]
    assert tuple(map(decode, codes)) == entries


def test_ranks_are_numbered_in_mesh_order() -> None:
    mesh = Placement.grid((2, 3))

    assert [tuple(at) for at in coordinates((2, 3)).tolist()] == [
        at for _, at in mesh.coordinates()
    ]
    assert numbers((2, 3))[0b01].tolist() == [0, 0, 0, 1, 1, 1]
    assert numbers((2, 3))[0b10].tolist() == [0, 1, 2, 0, 1, 2]
    assert numbers((2, 3))[0b11].tolist() == [0, 1, 2, 3, 4, 5]
    assert (num_ranks((2, 3), 0), num_ranks((2, 3), 0b10), num_ranks((2, 3), 0b11)) == (1, 3, 6)


@pytest.mark.parametrize("extent", [0, 1, 5, 12])
@pytest.mark.parametrize("mesh", [(3,), (2, 3), (2, 1, 2)])
def test_intervals_are_the_slices_of_one_dim(extent: int, mesh: tuple[int, ...]) -> None:
    start, stop = intervals(extent, mesh)

    for mask in range(1 << len(mesh)):
        split = NdSbp(*(decode(0 if mask >> axis & 1 else BROADCAST) for axis in range(len(mesh))))
        for rank, at in enumerate(coordinates(mesh).tolist()):
            bounds = local_bounds((extent,), split, mesh, at)
            assert (start[mask, rank], stop[mask, rank]) == bounds[0]


def test_a_layout_numbers_the_product_of_its_entries() -> None:
    entries = ((0, 1, BROADCAST), (0, BROADCAST, SUM, MAX))

    layout = Layout.of((2, 2), entries, num_dims=2)

    assert [tuple(codes) for codes in layout.codes.tolist()] == list(product(*entries))
    assert [layout.index(codes) for codes in product(*entries)] == list(range(len(layout)))


def test_a_layout_knows_the_axes_of_each_kind() -> None:
    layout = Layout.of((2, 2, 2), ((0, 1, BROADCAST, SUM, MAX),) * 3, num_dims=2)

    at = layout.index((1, SUM, 1))
    other = layout.index((MAX, BROADCAST, SUM))

    assert layout.splits[at].tolist() == [0, 0b101]
    masks = (layout.split, layout.partial, layout.sums, layout.copied)
    assert [int(mask[at]) for mask in masks] == [0b101, 0b010, 0b010, 0]
    assert [int(mask[other]) for mask in masks] == [0, 0b101, 0b100, 0b010]
    assert (layout.kinds[at], layout.kinds[other]) == (1, 1 | 2)


def test_states_of_one_form_hold_the_same_slices() -> None:
    layout = Layout.of((2, 2), ((0, 1, BROADCAST, SUM, MAX),) * 2, num_dims=2)

    assert np.array_equal(layout.forms[layout.form], layout.splits)
    assert len(layout.forms) == 9


def test_a_group_along_the_outer_of_two_splits_does_not_cover_a_half() -> None:
    outer, both, inner = 0b01, 0b11, 0b10

    covered = covers(8, (2, 2), together=True)[..., 0]

    assert covered[both, inner, outer], "the quarters of a half make that half"
    assert not covered[both, outer, inner], "quarters 0 and 2 make no half"
    assert covered[both, both, 0], "all quarters make the whole"
    assert not covered[both, 0, outer]
    assert covered[outer, 0, both], "a half has its quarters"


def test_each_rank_is_asked_alone_where_shards_are_uneven() -> None:
    covered = covers(1, (2,), together=False)

    # Rank 0 holds the one element, rank 1 nothing; both want all of it.
    assert covered[1, 0, 0].tolist() == [True, False]
    assert covered[1, 1, 0].tolist() == [True, True]
