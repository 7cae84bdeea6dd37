"""SBP values, their text, and the geometry of shards; properties over any nd-SBP."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpTypeError, SbpValueError
from sbp_core.sbp import (
    B,
    Broadcast,
    NdSbp,
    P,
    Partial,
    S,
    Split,
    all_entries,
    all_nd_sbps,
    check_sbp,
    local_bounds,
    local_shape,
    parse_sbp,
    split_bounds,
)

quick = settings(derandomize=True, deadline=None, max_examples=150)

entries = st.one_of(
    st.integers(0, 12).map(S),
    st.just(B),
    st.sampled_from([P, P("sum"), P("max"), P("min")]),
)
nd_sbps = st.lists(entries, max_size=4).map(lambda chosen: NdSbp(*chosen))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], NdSbp, tuple[int, ...]]:
    """A shape with extents 0..7, a mesh of one to three axes, and an nd-SBP that fits both."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    choices = all_entries(len(shape), ("sum", "max"))
    return shape, NdSbp(*(draw(st.sampled_from(choices)) for _ in mesh)), mesh


@quick
@given(nd_sbps)
def test_what_is_printed_can_be_parsed(sbp: NdSbp) -> None:
    assert NdSbp.parse(str(sbp)) == sbp
    assert NdSbp.parse(f"( {sbp} )") == sbp


@quick
@given(nd_sbps)
def test_the_repr_is_the_code_that_makes_the_value(sbp: NdSbp) -> None:
    assert eval(repr(sbp), {"NdSbp": NdSbp, "S": S, "B": B, "P": P}) == sbp


@quick
@given(nd_sbps)
def test_values_survive_pickling_and_copying(sbp: NdSbp) -> None:
    restored = pickle.loads(pickle.dumps(sbp))

    assert restored == sbp
    assert type(restored) is NdSbp
    assert hash(restored) == hash(sbp)
    assert copy.deepcopy(sbp) == sbp


@quick
@given(layouts())
def test_the_slices_of_all_split_coordinates_tile_the_tensor(
    layout: tuple[tuple[int, ...], NdSbp, tuple[int, ...]],
) -> None:
    shape, sbp, mesh = layout
    split = [isinstance(entry, Split) for entry in sbp]
    owners = dict.fromkeys(product(*(range(extent) for extent in shape)), 0)

    for at in product(*(range(n if cut else 1) for n, cut in zip(mesh, split, strict=True))):
        bounds = local_bounds(shape, sbp, mesh, at)
        for element in product(*(range(start, stop) for start, stop in bounds)):
            owners[element] += 1

    assert all(count == 1 for count in owners.values())


@quick
@given(layouts())
def test_ranks_that_differ_on_unsplit_axes_hold_the_same_slice(
    layout: tuple[tuple[int, ...], NdSbp, tuple[int, ...]],
) -> None:
    shape, sbp, mesh = layout

    for at in product(*map(range, mesh)):
        base = [
            index if isinstance(entry, Split) else 0 for index, entry in zip(at, sbp, strict=True)
        ]
        assert local_bounds(shape, sbp, mesh, at) == local_bounds(shape, sbp, mesh, base)


@quick
@given(layouts())
def test_each_axis_takes_apart_what_the_one_before_left(
    layout: tuple[tuple[int, ...], NdSbp, tuple[int, ...]],
) -> None:
    shape, sbp, mesh = layout

    for at in product(*map(range, mesh)):
        left = list(shape)
        for entry, n, index in zip(sbp, mesh, at, strict=True):
            if isinstance(entry, Split):
                base, more = divmod(left[entry.dim], n)
                left[entry.dim] = base + (index < more)
        assert local_shape(shape, sbp, mesh, at) == tuple(left)


@quick
@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_balanced_and_cover_the_extent_in_order(extent: int, parts: int) -> None:
    bounds = split_bounds(extent, parts)
    sizes = [stop - start for start, stop in bounds]

    assert bounds[0][0] == 0
    assert bounds[-1][1] == extent
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert bounds == tuple(split_bounds(extent, parts, index) for index in range(parts))


def test_a_short_dim_gives_empty_shards() -> None:
    assert split_bounds(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert local_shape((2, 3), NdSbp(S(0)), (4,), (3,)) == (0, 3)


def test_two_axes_on_one_dim_apply_in_order() -> None:
    slices = [
        local_bounds((5,), NdSbp(S(0), S(0)), (2, 2), at) for at in product(range(2), repeat=2)
    ]

    assert slices == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("S(0)", S(0)),
        (" S( 12 ) ", S(12)),
        ("B", B),
        ("P", P),
        ("P(sum)", P),
        ("P('max')", P("max")),
        ('P("min")', P("min")),
    ],
)
def test_every_spelling_is_read(text: str, value: Split | Broadcast | Partial) -> None:
    assert parse_sbp(text) == value


@pytest.mark.parametrize("text", ["S", "S(-1)", "S(a)", "b", "Q", "P(mean)", "S(0) B", ""])
def test_what_is_no_sbp_is_refused_with_the_spellings(text: str) -> None:
    with pytest.raises(SbpValueError, match="accepted here: "):
        parse_sbp(text)


@pytest.mark.parametrize("dim", [-1, 1.0, True, "0"])
def test_a_split_needs_a_dim(dim: object) -> None:
    with pytest.raises(SbpValueError, match="names no tensor dim"):
        S(dim)  # type: ignore[arg-type]


def test_an_nd_sbp_takes_sbp_values_only() -> None:
    with pytest.raises(SbpTypeError, match="'S' is no SBP value"):
        NdSbp("S")  # type: ignore[arg-type]


def test_an_nd_sbp_must_fit_the_mesh_and_the_shape() -> None:
    with pytest.raises(SbpValueError, match="one entry for each mesh axis"):
        check_sbp((4, 4), NdSbp(S(0)), (2, 2))
    with pytest.raises(SbpValueError, match=r"accepted here: B, P, S\(0\), S\(1\)"):
        local_bounds((4, 4), NdSbp(S(2)), (2,), (0,))


def test_questions_about_an_nd_sbp_are_answered() -> None:
    sbp = NdSbp(S(0), B, S(0), P("max"))

    assert sbp.split_axes(0) == (0, 2)
    assert sbp.split_axes(1) == ()
    assert sbp.has_partial
    assert not NdSbp(S(0), B).has_partial
    assert NdSbp(B, B).is_broadcast
    assert not sbp.is_broadcast
    assert sbp.replace(1, P) == NdSbp(S(0), P, S(0), P("max"))


def test_all_nd_sbps_are_listed_once() -> None:
    listed = list(all_nd_sbps(2, 2, ("sum", "max")))

    assert len(listed) == len(set(listed)) == prod([5, 5])
    assert all_entries(2) == (S(0), S(1), B, P)
