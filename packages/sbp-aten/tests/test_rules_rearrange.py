"""Operators that join, repeat, move elements, or work on diagonals, against one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_aten.rules import rearrange
from sbp_core.placement import Placement
from sbp_core.sbp import Sbp, parse_sbp
from sbp_core.signatures import combine, derive, legal_signatures, localize
from sbp_core.signatures.derivations import derivation
from sbp_core.signatures.rule import LocalProgram
from sbp_torch.signatures.verification import abstract_call, verify
from sbp_torch.testing.signatures import AXIS_SIZES, Sample, sample

_EXAMPLES = settings(max_examples=15, derandomize=True, deadline=None)
_draw = torch.Generator().manual_seed(17)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape, generator=_draw).bool()


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=_draw)


JOINED = [
    sample([real(4, 5), real(4, 2)], 1),
    sample([real(2, 4, 5), real(2, 4, 5), real(2, 4, 5)], -3),
    sample([real(0), real(5, 3), real(0, 3)]),
    sample([real(5), whole(2)]),
    sample([truth(5, 2)], 1),
]
REPEATED = [
    sample(real(5, 3), [1, 2]),
    sample(real(5), [3, 2]),
    sample(real(5, 1), [1, 2, 4]),
    sample(real(2, 0, 3), [1, 3, 0]),
    sample(truth(3), [1, 1]),
    sample(real(), [2]),
]
MATRICES = [
    sample(real(5, 5)),
    sample(real(3, 7), 1),
    sample(whole(7, 4), -2),
    sample(real(2, 5, 3), 3),
    sample(truth(5, 7), -5),
]
DIAGONALS = [
    sample(real(5, 5)),
    sample(real(5, 7), 1),
    sample(real(7, 5), -2),
    sample(real(5, 7), -2),
    sample(truth(7, 5), 2),
    sample(real(5, 7), 9),
    sample(real(5, 2, 7), 1, 2, 0),
]

CASES: dict[str, list[Sample]] = {
    "aten._chunk_cat.default": [
        sample([real(5, 7, 2), real(5, 3)], 1, 2),
        sample([real(4, 3), real(2, 3)], 0, 3),
    ],
    "aten.cat.default": JOINED,
    "aten.concat.default": JOINED[:1],
    "aten.concatenate.default": JOINED[:1],
    "aten.diag_embed.default": [
        sample(real(5)),
        sample(truth(3, 5), 2),
        sample(real(3, 5), -1, 0, 2),
    ],
    "aten.diagonal.default": DIAGONALS,
    "aten.diagonal_backward.default": [
        sample(real(5), [5, 5], 0, 0, 1),
        sample(real(5), [5, 7], 1, 0, 1),
        sample(truth(5), [7, 5], -2, 0, 1),
        sample(real(3), [5, 7], -2, 0, 1),
        sample(real(0), [5, 7], 9, 0, 1),
        sample(real(2, 4), [5, 2, 7], 1, 2, 0),
    ],
    "aten.diagonal_copy.default": DIAGONALS,
    "aten.flip.default": [sample(real(4, 5, 1), [0, -1]), sample(real(5), [])],
    "aten.fliplr.default": [sample(real(4, 5))],
    "aten.flipud.default": [sample(real(4, 5))],
    "aten.linalg_diagonal.default": [sample(real(2, 5, 7), offset=1)],
    "aten.repeat.default": REPEATED,
    "aten.roll.default": [
        sample(real(4, 5), [1], [0]),
        sample(real(5, 7), [10, -7], [-2, 1]),
        sample(real(5, 3, 4), [3, -1], [1, 1]),
        sample(real(4, 5), [5]),
        sample(real(5, 2, 3), [3]),
        sample(real(5, 2, 3), [-6]),
        sample(real(0, 3), [1]),
        sample(real(3, 0), [1]),
        sample(real(4, 5), [40]),
        sample(real(4, 5), [3]),
        sample(real(), [1]),
    ],
    "aten.rot90.default": [sample(real(4, 5, 3), k, [0, -1]) for k in (-3, 0, 2, 3)]
    + [sample(real(5, 2))],
    "aten.stack.default": [sample([real(4, 5), real(4, 5)], 1), sample([real(3)], -1)],
    "aten.tile.default": [sample(real(5, 3), [2]), sample(real(5), [2, 1])],
    "aten.trace.default": [sample(real(5, 5)), sample(whole(7, 3)), sample(real(1, 5))],
    "aten.tril.default": MATRICES,
    "aten.triu.default": MATRICES,
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in CASES[op]:
        report = verify(op, *args, axis_sizes=AXIS_SIZES, isolated=False, **kwargs)

        assert report.ok, str(report)


def test_every_rule_of_these_modules_is_run() -> None:
    assert {*rearrange.RULES} == set(CASES)


def claims(op: str, *args: Any) -> set[str]:
    """Return the signatures on an axis of two ranks, but for all B."""
    return {str(entry) for entry in legal_signatures(op, *args) if entry.origin != "all B"}


def local(op: str, args: Sequence[Any], inputs: str, output: str, rank: int) -> LocalProgram:
    """Return what a rank of two runs under one signature."""
    call = abstract_call(op, args, {})
    cut: tuple[Sbp, ...] = tuple(map(parse_sbp, inputs.split(", ")))
    (part,) = (
        entry
        for entry in derive(call, 2)
        if entry.inputs == cut and entry.outputs == (parse_sbp(output),)
    )
    return localize(call, combine([part]), Placement.grid((2,)), rank)


def test_a_join_splits_every_dim_but_the_joined_one_and_takes_partial_values_of_all() -> None:
    assert claims("aten.cat.default", [(4, 6), (4, 2)], 1) == {
        "S(0), S(0) -> S(0)",
        "P, P -> P",
        'P("max"), P("max") -> P("max")',
        'P("min"), P("min") -> P("min")',
    }


def test_a_triangle_of_a_shard_lies_by_its_rows_and_columns() -> None:
    assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= claims("aten.tril.default", (5, 7), 1)

    rows = local("aten.tril.default", ((5, 7), 1), "S(0)", "S(0)", 1)
    columns = local("aten.tril.default", ((5, 7), 1), "S(1)", "S(1)", 1)
    assert rows.calls[0].args[1] == 1 + 3
    assert columns.calls[0].args[1] == 1 - 4


def test_a_diagonal_follows_the_rows_and_sums_over_the_columns() -> None:
    assert {"S(0) -> S(0)", "S(1) -> P"} <= claims("aten.diagonal.default", (6, 6))
    assert {"S(0) -> P", "S(1) -> P"} <= claims("aten.diagonal.default", (6, 6), -1)
    assert {"S(0) -> P", "S(1) -> P"} <= claims("aten.trace.default", (6, 6))


def test_the_gradient_of_a_diagonal_is_made_where_it_lies() -> None:
    made = claims("aten.diagonal_backward.default", (5,), (6, 6), -1, 0, 1)

    assert {"B -> S(0)", "B -> S(1)", "S(0) -> P"} <= made


def test_a_rank_makes_its_part_of_a_repetition() -> None:
    assert "B -> S(0)" in claims("aten.repeat.default", (3,), (3,))

    second = local("aten.repeat.default", ((3,), (3,)), "B", "S(0)", 1)
    assert [(call.op, call.args[1:]) for call in second.calls] == [
        ("aten.repeat.default", ((2,),)),
        ("aten.slice.Tensor", (0, 2, 6)),
    ]


def test_rolling_rows_as_one_row_leaves_what_is_behind_them_free() -> None:
    assert "S(1) -> S(1)" in claims("aten.roll.default", (4, 6), (12,))
    assert "S(1) -> S(1)" not in claims("aten.roll.default", (4, 6), (3,))

    rolled = local("aten.roll.default", ((4, 6), (12,)), "S(1)", "S(1)", 0)
    assert rolled.calls[0].args[1] == (2 * 3,)


def test_a_turn_keeps_the_shards_of_the_dim_that_it_does_not_reverse() -> None:
    turned = claims("aten.rot90.default", (4, 6))

    assert "S(0) -> S(1)" in turned
    assert not any(text.startswith("S(1)") for text in turned)


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("aten.cat.default", ([(4,), (2,)],), "shards of the parts would interleave"),
        ("aten.stack.default", ([(4,), (4,)],), "each part is one element of it"),
        ("aten.repeat.default", ((4,), (2,)), "a part of every repetition"),
        ("aten.flip.default", ((4,), (0,)), "its order is reversed"),
        ("aten.roll.default", ((4,), (1,)), "its elements move on"),
        ("aten.diagonal.default", ((4, 4), 1), "it is shorter than the rows"),
    ],
)
def test_what_has_to_stay_whole_says_why(op: str, args: Sequence[Any], why: str) -> None:
    assert why in derivation(abstract_call(op, args, {})).notation.why


_extents = st.sampled_from([0, 1, 2, 3, 5])
_axes = st.tuples(st.integers(2, 4), st.integers(2, 4))


@pytest.mark.slow
@_EXAMPLES
@given(shape=st.lists(_extents, min_size=1, max_size=3), axes=_axes, data=st.data())
def test_any_join_is_cut_as_derived(
    shape: list[int], axes: tuple[int, int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    lengths = data.draw(st.lists(_extents, min_size=1, max_size=3))
    parts = [real(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]

    joined = verify("aten.cat.default", parts, dim, axis_sizes=axes, isolated=False)
    stacked = verify(
        "aten.stack.default", [parts[0]] * len(parts), dim, axis_sizes=axes, isolated=False
    )

    assert joined.ok, str(joined)
    assert stacked.ok, str(stacked)


@pytest.mark.slow
@_EXAMPLES
@given(
    shape=st.lists(_extents, min_size=0, max_size=3),
    repeats=st.lists(st.integers(0, 3), min_size=3, max_size=4),
    axes=_axes,
)
def test_any_repetition_is_cut_as_derived(
    shape: list[int], repeats: list[int], axes: tuple[int, int]
) -> None:
    report = verify("aten.repeat.default", real(*shape), repeats, axis_sizes=axes, isolated=False)

    assert report.ok, str(report)


@pytest.mark.slow
@_EXAMPLES
@given(rows=_extents, columns=_extents, offset=st.integers(-6, 6), axes=_axes)
def test_any_diagonal_and_triangle_is_cut_as_derived(
    rows: int, columns: int, offset: int, axes: tuple[int, int]
) -> None:
    matrix = real(2, rows, columns)
    diagonal = matrix.diagonal(offset, 1, 2).clone()
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("aten.diagonal.default", (matrix, offset, 1, 2)),
        ("aten.diagonal_backward.default", (diagonal, [2, rows, columns], offset, 1, 2)),
        ("aten.diag_embed.default", (diagonal, offset)),
        ("aten.tril.default", (matrix, offset)),
        ("aten.triu.default", (matrix, offset)),
    ]

    for op, args in calls:
        report = verify(op, *args, axis_sizes=axes, isolated=False)
        assert report.ok, str(report)


@pytest.mark.slow
@_EXAMPLES
@given(
    shape=st.lists(_extents, min_size=1, max_size=3),
    shifts=st.lists(st.integers(-12, 12), min_size=3, max_size=3),
    axes=_axes,
    data=st.data(),
)
def test_any_roll_and_flip_is_cut_as_derived(
    shape: list[int], shifts: list[int], axes: tuple[int, int], data: st.DataObject
) -> None:
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    tensor, moves = real(*shape), shifts[: max(len(dims), 1)]

    rolled = verify("aten.roll.default", tensor, moves, dims, axis_sizes=axes, isolated=False)
    flipped = verify("aten.flip.default", tensor, dims, axis_sizes=axes, isolated=False)

    assert rolled.ok, str(rolled)
    assert flipped.ok, str(flipped)
