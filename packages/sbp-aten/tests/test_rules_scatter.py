"""Rules of writing by index along one dim: verified by execution, and what they claim."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks_of_a_call import on_each_rank

from sbp_aten.rules import scatter
from sbp_core.sbp import B, P, S, Sbp
from sbp_core.signatures import derive
from sbp_torch.signatures.verification import call_of
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(9)

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return real(*shape) > 0


def distinct(high: int, count: int, columns: int) -> torch.Tensor:
    """Return an index of shape (count, columns) that names no place twice."""
    orders = [torch.randperm(high, generator=_draw)[:count] for _ in range(columns)]
    return torch.stack(orders, 1)


def claims(op: str, *args: Any, **kwargs: Any) -> dict[tuple[Sbp, ...], tuple[Sbp, ...]]:
    """Return inputs -> outputs of the claimed signatures."""
    return {entry.inputs: entry.outputs for entry in derive(call_of(op, args, kwargs)[0], 2)}


def _reduced(kind: str, *, rows: bool, integers: bool = False, starts: bool = True) -> Sample:
    draw = (lambda *shape: whole(9, *shape)) if integers else real
    index = whole(5, 3) if rows else whole(5, 3, 4)
    return sample(draw(5, 4), 0, index, draw(3, 4), kind, include_self=starts)


def _all_reduced(*, rows: bool, kinds: tuple[str, ...]) -> list[Sample]:
    made = [_reduced(kind, rows=rows, starts=starts) for kind in kinds for starts in (True, False)]
    return [*made, _reduced("mean", rows=rows, integers=True)]


CASES: dict[str, list[Sample]] = {
    "aten.index_add.default": [
        sample(real(5, 4), -1, whole(4, 3), real(5, 3), alpha=2),
        sample(truth(5, 4), 0, whole(5, 3), truth(3, 4)),
        sample(real(), 0, whole(1, 1), real()),
    ],
    "aten.index_copy.default": [sample(real(5, 4), 0, torch.tensor([3, 0, 4]), real(3, 4))],
    "aten.index_fill.int_Scalar": [
        sample(real(5, 4), -1, whole(8, 3) - 4, 0),
        sample(real(5, 4), 0, whole(5) - 5, 3.0),
        sample(truth(5, 4), 0, whole(5, 3), True),
        sample(truth(5, 4), 0, whole(5, 3), False),
    ],
    "aten.index_fill.int_Tensor": [sample(real(5, 4), 0, whole(5, 2), real())],
    "aten.index_reduce.default": _all_reduced(rows=True, kinds=REDUCTIONS[1:]),
    "aten.scatter.reduce": [
        sample(real(5, 4), 0, whole(5, 3, 4), real(3, 4), reduce="add"),
        sample(real(5, 4), 0, whole(5, 3, 4), real(3, 4), reduce="multiply"),
    ],
    "aten.scatter.src": [
        sample(real(5, 4), 0, distinct(5, 3, 4), real(3, 4)),
        sample(real(5, 7), 0, distinct(5, 3, 4), real(4, 6)),
    ],
    "aten.scatter.value": [
        sample(real(5, 4), 0, distinct(5, 3, 4), 0),
        sample(real(5, 7), 0, distinct(5, 3, 4), 2.0),
        sample(truth(5, 7), 0, distinct(5, 3, 4), 1),
    ],
    "aten.scatter.value_reduce": [
        sample(real(5, 4), 0, whole(5, 3, 4), 2.0, reduce="add"),
        sample(real(5, 4), 0, whole(5, 3, 4), -2.0, reduce="multiply"),
    ],
    "aten.scatter_add.default": [
        sample(real(5, 4), 0, whole(5, 3, 4), real(3, 4)),
        sample(real(5, 4), 1, whole(4, 3, 2), real(4, 7)),
        sample(truth(5, 4), 1, whole(4, 3, 4), truth(5, 4)),
        sample(real(), 0, whole(1, 3), real(3)),
        sample(real(3), 0, whole(3), real()),
        sample(real(3, 4), 0, whole(1, 0), real(3)),
    ],
    "aten.scatter_reduce.two": _all_reduced(rows=False, kinds=REDUCTIONS),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("op", CASES)
def test_scatter_can_be_cut_as_its_rules_say(op: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "index_reduce|The reduce argument")
        check_rule(op, CASES[op], axis_sizes=(2, 3))


def test_every_rule_of_scatter_is_verified() -> None:
    assert set(CASES) == set(scatter.RULES)


def test_scatter_add_into_split_rows_drops_what_goes_elsewhere() -> None:
    tensor, index, source = real(7, 3), whole(7, 9, 3), real(9, 3)
    index[0] = torch.tensor([0, 3, 6])

    args = [tensor, 0, index, source]
    made = on_each_rank("aten.scatter_add.default", args, [S(0), B, B], [S(0)], 3)

    assert torch.allclose(torch.cat(made), tensor.scatter_add(0, index, source))


def test_split_rows_are_not_aligned_with_split_updates_of_scatter_add() -> None:
    # What DTensor does for S(0) inputs; its gradients are wrong then.
    found = claims("aten.scatter_add.default", real(6, 4), 0, whole(6, 6, 4), real(6, 4))

    assert (S(0), S(0), S(0)) not in found
    assert found[S(1), S(1), S(1)] == (S(1),)
    assert found[S(0), B, B] == (S(0),)


def test_gradients_of_scatter_add_into_split_rows_are_those_of_one_device() -> None:
    gradient, index = real(7, 3), whole(7, 9, 3)

    # The gradient of the source is read from the rows that the gradient of the result has.
    made = on_each_rank("aten.gather.default", [gradient, 0, index], [S(0), B], [P], 3)

    assert torch.allclose(sum(made), gradient.gather(0, index))


def test_maxima_of_updates_that_are_split_are_maxima_of_all() -> None:
    tensor, index, source = real(5, 4), whole(5, 7, 4), real(7, 4)

    args = [tensor, 0, index, source, "amax"]
    made = on_each_rank("aten.scatter_reduce.two", args, [B, S(0), S(0)], [P("max")], 3)

    expected = tensor.scatter_reduce(0, index, source, "amax")
    assert torch.equal(torch.stack(made).amax(0), expected)


def test_updates_that_replace_what_is_there_are_needed_whole() -> None:
    for starts in (True, False):
        args = (real(5, 4), 0, whole(5, 3, 4), real(3, 4), "amax")
        found = claims("aten.scatter_reduce.two", *args, include_self=starts)
        assert ((B, S(0), S(0)) in found) is starts


def test_source_beyond_the_index_is_cut_to_it() -> None:
    tensor, index, source = real(5, 4), whole(5, 3, 2), real(6, 7)
    expected = tensor.scatter_reduce(0, index, source, "amin")

    args = [tensor, 0, index, source, "amin"]
    made = on_each_rank("aten.scatter_reduce.two", args, [B, S(0), B], [P("min")], 2)
    columns = on_each_rank("aten.scatter_reduce.two", args, [S(1), B, B], [S(1)], 3)

    assert torch.equal(torch.stack(made).amin(0), expected)
    assert torch.equal(torch.cat(columns, 1), expected)


def test_updates_that_are_added_may_be_split_beside_partial_sums() -> None:
    index, source = whole(5, 7, 4), real(7, 4)

    found = claims("aten.scatter_add.default", real(5, 4), 0, index, source)

    assert found[P, S(0), S(0)] == (P,)
    # What is there would be added by each rank.
    assert (B, S(0), S(0)) not in found
