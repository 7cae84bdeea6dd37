"""Where pieces lie in memory: what needs no packing is found, and nothing else is."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing.manifest import manifest_of, span
from sbp_core.boxing.slices import Bounds, collective_bytes
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

LINE = Placement.grid((3,), ("x",))


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], Bounds]:
    """A shape, and a slice of it that is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    starts = [draw(st.integers(0, extent - 1)) for extent in shape]
    bounds = [
        (start, draw(st.integers(start + 1, extent)))
        for start, extent in zip(starts, shape, strict=True)
    ]
    return shape, tuple(bounds)


@pytest.mark.slow
@settings(derandomize=True, max_examples=300, deadline=None)
@given(slices())
def test_a_span_is_where_the_elements_of_a_slice_are_if_they_have_no_gaps(
    given_slice: tuple[tuple[int, ...], Bounds],
) -> None:
    shape, bounds = given_slice
    numbers = torch.arange(prod(shape)).reshape(shape)
    held = numbers[tuple(slice(*pair) for pair in bounds)].flatten().tolist()
    has_gaps = held != list(range(held[0], held[0] + len(held)))

    assert span(shape, bounds) == (None if has_gaps else (held[0], held[0] + len(held)))


def step(
    kind: StepKind,
    source: str,
    target: str,
    shape: tuple[int, ...],
    mesh: Placement = LINE,
    axes: tuple[int, ...] = (0,),
) -> BoxingStep:
    made = BoxingStep(
        kind=kind,
        shape=shape,
        dtype="float32",
        source=(mesh, NdSbp.parse(source)),
        target=(mesh, NdSbp.parse(target)),
        axes=axes,
        size_bytes=0,
    )
    assert collective_bytes(made) > 0
    return made


@pytest.mark.parametrize(
    ("made", "packed", "unpacked"),
    [
        (step(StepKind.REDUCE_SCATTER, "P", "S(0)", (7, 4)), True, False),
        (step(StepKind.REDUCE_SCATTER, "P", "S(1)", (7, 4)), False, False),
        (step(StepKind.REDUCE_SCATTER, "P", "S(1)", (1, 4)), True, False),
        (step(StepKind.ALL_GATHER, "S(0)", "B", (7, 4)), False, True),
        (step(StepKind.ALL_GATHER, "S(1)", "B", (7, 4)), False, False),
        (step(StepKind.ALL_TO_ALL, "S(0)", "S(1)", (7, 4)), False, True),
        (step(StepKind.ALL_TO_ALL, "S(1)", "S(0)", (7, 4)), True, False),
        (step(StepKind.ALL_TO_ALL, "S(0)", "S(1)", (3, 3, 5)), True, True),
    ],
)
def test_what_lies_in_order_in_memory_is_known(
    made: BoxingStep, packed: bool, unpacked: bool
) -> None:
    for rank in LINE.rank_list:
        known = manifest_of(made, rank)

        assert (known.packed, known.unpacked) == (packed, unpacked)
        assert known.gathers == (made.kind is StepKind.ALL_GATHER)


@pytest.mark.parametrize(("rows", "is_even"), [(6, True), (7, False), (2, False)])
def test_all_ranks_agree_whether_parts_are_even(rows: int, is_even: bool) -> None:
    made = step(StepKind.ALL_TO_ALL, "S(0)", "S(1)", (rows, 3))

    assert {manifest_of(made, rank).is_even for rank in LINE.rank_list} == {is_even}


def test_the_ranks_of_merged_axes_are_one_group() -> None:
    mesh = Placement.grid((2, 2, 2), ("x", "y", "z"))
    made = step(StepKind.ALL_GATHER, "S(0), B, S(0)", "B, B, B", (8, 3), mesh=mesh, axes=(0, 2))

    known = manifest_of(made, 6)

    assert made.group(6) == (2, 3, 6, 7)
    assert known.place == 2 and known.received_sizes == (6, 6, 6, 6)
    assert known.gathers and known.unpacked and known.is_even and not known.is_idle


@pytest.mark.parametrize(
    ("kind", "source", "target", "shape", "is_flat"),
    [
        (StepKind.ALL_GATHER, "S(0)", "B", (6, 3), True),
        (StepKind.ALL_GATHER, "S(0)", "B", (7, 3), False),
        (StepKind.ALL_GATHER, "S(1)", "B", (6, 3), False),
        (StepKind.ALL_TO_ALL, "S(0)", "S(1)", (3, 3), True),
        (StepKind.ALL_TO_ALL, "S(0)", "S(1)", (6, 3), False),
        (StepKind.REDUCE_SCATTER, "P", "S(0)", (6, 3), False),
    ],
)
def test_all_ranks_agree_whether_parts_are_even_and_lie_in_order(
    kind: StepKind, source: str, target: str, shape: tuple[int, ...], is_flat: bool
) -> None:
    made = step(kind, source, target, shape)

    assert {manifest_of(made, rank).is_flat for rank in LINE.rank_list} == {is_flat}
