"""Rules of updates by row: verified by execution, on shards with few rows and with none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks_of_a_call import on_each_rank

from sbp_aten.rules import row_updates
from sbp_core.sbp import B, S
from sbp_core.signatures import derive
from sbp_torch.ops.operators import operator_of
from sbp_torch.ops.row_updates import own_rows, unique_rows
from sbp_torch.signatures.verification import call_of
from sbp_torch.testing.signatures import check_rule, sample

_draw = torch.Generator().manual_seed(3)

ADAGRAD = (
    (("~s",), "aten.addcmul.default", ("~row1", "~sums0", "~sums0"), ()),
    (("~r",), "aten.sqrt.default", ("~s",), ()),
    (("~b",), "aten.add.Tensor", ("~r", 1e-10), ()),
    (("~p",), "aten.addcdiv.default", ("~row0", "~sums0", "~b"), (("value", -0.1),)),
)

#: One number of each row for all of its columns.
ROW_WISE = (
    (("~q",), "aten.mul.Tensor", ("~sums0", "~sums0"), ()),
    (("~m",), "aten.mean.dim", ("~q", (1,), True), ()),
    (("~s",), "aten.add.Tensor", ("~row1", "~m"), ()),
    (("~r",), "aten.sqrt.default", ("~s",), ()),
    (("~b",), "aten.add.Tensor", ("~r", 1e-10), ()),
    (("~p",), "aten.addcdiv.default", ("~row0", "~sums0", "~b"), (("value", -0.1),)),
)


def real(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def execute(op, args, kwargs):
    """Run an operator, also one that is not PyTorch's."""
    return operator_of(op)(*args, **kwargs)


def _updates(program, width, rows=(6, 2, 0, -1, -1)):
    """Return the arguments of an update of a table of 7 rows of 4 columns."""
    found = torch.tensor(rows)
    sums = real(len(rows), 4).masked_fill(found.unsqueeze(1) < 0, 0)
    return found, [sums], [real(7, 4), real(7, width).abs()], program, ["~p", "~s"]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (
            "sbp.unique_rows.default",
            (torch.tensor([[3, 1], [-1, 3]]), [real(2, 2, 3), real(2, 2, 1)]),
        ),
        ("sbp.unique_rows.default", (torch.tensor([], dtype=torch.int64), [real(0, 3)])),
        ("sbp.row_update", _updates(ADAGRAD, 4)),
        ("sbp.row_update", _updates(ADAGRAD, 4, (-1, -1))),
        ("sbp.row_update", _updates(ROW_WISE, 1)),
    ],
)
def test_the_rules_are_right(op, args):
    check_rule(op, [sample(*args)], execute=execute)


def test_a_table_is_split_by_rows_or_by_columns():
    call, _ = call_of("sbp.row_update", _updates(ADAGRAD, 4), {}, execute=execute)
    legal = {(one.inputs, one.outputs) for one in derive(call, 2)}

    assert ((B, B, S(0), S(0)), (S(0), S(0))) in legal
    assert ((B, S(1), S(1), S(1)), (S(1), S(1))) in legal
    assert len(legal) == 3


def test_a_table_with_one_number_a_row_is_not_split_by_columns():
    call, _ = call_of("sbp.row_update", _updates(ROW_WISE, 1), {}, execute=execute)

    assert {one.outputs for one in derive(call, 2)} == {(S(0), S(0)), (B, B)}


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_without_a_looked_up_row_change_nothing(ranks):
    args = _updates(ADAGRAD, 4, (6, -1))
    (_, _, (table, _), *_) = args

    made = on_each_rank("sbp.row_update", args, (B, B, S(0), S(0)), (S(0), S(0)), ranks, execute)

    new = torch.cat(made)
    assert new.shape == table.shape
    assert torch.equal(new[:6], table[:6])
    assert not torch.equal(new[6], table[6])


@given(st.lists(st.integers(-1, 8), max_size=12), st.integers(1, 3))
def test_sums_by_row_are_the_rows_of_the_dense_gradient(indices, width):
    places = torch.tensor(indices, dtype=torch.int64)
    parts = torch.randn(len(indices), width, dtype=torch.float64)

    rows, sums = unique_rows(places, [parts])

    kept = places >= 0
    dense = torch.zeros(9, width, dtype=torch.float64)
    dense.index_add_(0, places[kept], parts[kept])
    found = torch.zeros_like(dense)
    found[rows[rows >= 0]] = sums[rows >= 0]
    torch.testing.assert_close(found, dense)
    assert not sums[rows < 0].any()
    assert sorted(rows[rows >= 0].tolist()) == sorted(set(places[kept].tolist()))


@given(st.lists(st.integers(0, 8), unique=True, max_size=9), st.integers(0, 8), st.integers(1, 9))
def test_slots_of_a_window_name_its_rows_alone(rows, first, length):
    given_rows = torch.tensor([*rows, -1, -1])
    sums = torch.arange(len(rows) + 2, dtype=torch.float64).unsqueeze(1) + 1

    index, own = own_rows(given_rows, [sums], first, length)

    inside = {
        row - first: float(sums[at]) for at, row in enumerate(rows) if 0 <= row - first < length
    }
    found = dict(zip(index.tolist(), own.squeeze(1).tolist(), strict=True))
    assert found == (inside or {0: 0.0})


def test_only_known_families_have_rules():
    assert set(row_updates.RULES) == {"sbp.row_update", "sbp.unique_rows.default"}
