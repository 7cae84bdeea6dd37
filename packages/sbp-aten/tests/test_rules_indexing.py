"""Rules of reading and writing by a list of indices, verified by execution, and what they claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks_of_a_call import on_each_rank

from sbp_aten.rules import (
    advanced,
    grouped,
    indexing,
    reductions,
    replace_view,
)
from sbp_core.sbp import B, P, S, Sbp
from sbp_core.signatures import derive
from sbp_torch.signatures.verification import call_of
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(5)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def single(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_draw)


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return real(*shape) > 0


def claims(op: str, *args: Any, **kwargs: Any) -> dict[tuple[Sbp, ...], tuple[Sbp, ...]]:
    """Return inputs -> outputs of the claimed signatures."""
    return {entry.inputs: entry.outputs for entry in derive(call_of(op, args, kwargs)[0], 2)}


def groups(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def _segments(kind: str) -> Sample:
    data, lengths = real(2, 5, 3), torch.tensor([[2, 0, 3], [1, 1, 3]])
    made = torch.ops.aten.segment_reduce.default(data, kind, lengths=lengths, axis=1)
    return sample(torch.randn_like(made), made, data, kind, lengths=lengths, axis=1)


EDGES = torch.linspace(-2, 2, 5, dtype=torch.float64)
LENGTHS = torch.tensor([2, 0, 3])
RANGE = [-1.0, 1.0]

READS: dict[str, list[Sample]] = {
    "aten._unsafe_index.Tensor": [sample(real(5, 3), [whole(-5, 5, 7)])],
    "aten._unsafe_masked_index.default": [
        sample(real(5, 3), truth(4, 6), [whole(-7, 7, 4, 1), whole(-7, 7, 6)], 0.0),
        sample(real(5, 3), truth(4, 3), [whole(0, 5, 4)], 2.0),
    ],
    "aten.gather.default": [
        sample(real(5, 7), 0, whole(0, 5, 3, 7)),
        sample(real(5, 7), -1, whole(0, 7, 3, 4)),
        sample(truth(5, 7), 1, whole(0, 7, 5, 4)),
        sample(real(), 0, whole(0, 1, 3)),
        sample(real(5), 0, whole(0, 5)),
        sample(real(5), 0, whole(0, 5, 2, 0)),
    ],
    "aten.index.Tensor": [
        sample(real(5, 3, 4), [None, whole(-3, 3, 4, 1), whole(-4, 4, 1, 5)]),
        sample(real(5, 3, 4), [whole(0, 5, 4), None, whole(0, 4, 2, 4)]),
        sample(truth(5, 3, 4), [None, whole(0, 3, 4)]),
        sample(real(5, 3, 4), [None, truth(3)]),
        sample(real(5, 3, 4), [truth(5), None, whole(0, 4, 1)]),
    ],
    "aten.index_select.default": [
        sample(real(5, 7, 2), -2, whole(0, 7, 3)),
        sample(truth(5, 7), 0, whole(0, 5)),
        sample(real(), 0, whole(0, 1, 1)),
    ],
    "aten.take.default": [sample(real(5, 3), whole(-15, 15, 4)), sample(real(), whole(0, 1, 4))],
}

WRITES: dict[str, list[Sample]] = {
    "aten._unsafe_index_put.default": [sample(real(5, 3), [whole(0, 5, 7)], real(3), True)],
    "aten._unsafe_masked_index_put_accumulate.default": [
        sample(real(5, 3), truth(4, 6), [whole(-7, 7, 4, 1), whole(-7, 7, 6)], real(4, 6)),
    ],
    "aten.index_put.default": [
        sample(real(5, 3, 4), [None, whole(-3, 3, 4, 1), whole(-4, 4, 5)], real(5, 4, 5), True),
        sample(real(5, 3, 4), [None, torch.tensor([0, -1])], real(2, 4), False),
        sample(real(5, 3), [torch.tensor([0, -1]), torch.tensor([[0], [2]])], real(), False),
        sample(real(5, 3, 4), [None, truth(3, 4)], real(5, 1), True),
        sample(real(5, 3), [torch.tensor([True, False, True, False, False])], real(2, 3)),
        sample(truth(5, 3), [whole(0, 5, 7)], truth(3), True),
    ],
    "aten.put.default": [
        sample(real(5, 3), torch.tensor([[0, -2], [7, 4]]), real(4), False),
        sample(real(5, 3), whole(0, 15, 7), real(7), True),
    ],
    "aten.as_strided_scatter.default": [sample(real(7, 3), real(2, 2), (2, 2), (1, 2), 1)],
    "aten.diagonal_scatter.default": [
        sample(real(7, 3), real(3), -1),
        sample(real(2, 7, 5), real(2, 4), -1, 2, 1),
    ],
    "aten.select_scatter.default": [sample(real(5, 3), real(3), 0, -2)],
    "aten.slice_scatter.default": [
        sample(real(7, 3), real(3, 3), 0, -6, 9223372036854775807, 2),
        sample(real(7, 3), real(7, 3)),
    ],
}

OTHERS: dict[str, list[Sample]] = {
    "aten._grouped_mm.default": [
        sample(single(12, 8), single(3, 8, 16), groups(3, 3, 12)),
        sample(single(8, 12), single(12, 16), groups(2, 7, 12)),
        sample(single(3, 5, 8), single(8, 12), groups(2, 7, 12)),
        sample(single(3, 5, 8), single(3, 8, 4)),
    ],
    "aten._histogramdd_bin_edges.default": [
        sample(real(7, 2), [4, 3], range=RANGE * 2, weight=real(7)),
        sample(real(7, 2), [4, 3]),
    ],
    "aten._histogramdd_from_bin_cts.default": [
        sample(real(7, 2), [4, 3], range=RANGE * 2, weight=real(7)),
        sample(real(7, 2), [4, 3]),
    ],
    "aten._histogramdd_from_bin_tensors.default": [
        sample(real(7, 2), [EDGES, EDGES[1:]], weight=real(7))
    ],
    "aten._segment_reduce_backward.default": [_segments("mean"), _segments("max")],
    "aten.histogram.bin_ct": [sample(real(7, 3), 4, range=RANGE), sample(real(7, 3), 4)],
    "aten.histogram.bins_tensor": [
        sample(real(7, 3), EDGES, weight=real(7, 3)),
        sample(real(7, 3), EDGES, density=True),
    ],
    "aten.masked_scatter.default": [sample(real(7, 3), truth(7, 3), real(30))],
    "aten.masked_scatter_backward.default": [sample(real(7, 3), truth(7, 3), (30,))],
    "aten.masked_select.default": [sample(real(7, 3), truth(3))],
    "aten.nonzero.default": [sample(truth(7, 3))],
    "aten.nonzero_static.default": [sample(truth(7, 3), size=5)],
    "aten.repeat_interleave.Tensor": [sample(whole(0, 3, 5))],
    "aten.segment_reduce.default": [
        sample(real(5, 3), "sum", lengths=LENGTHS, axis=0),
        sample(real(5, 3), "max", offsets=torch.tensor([0, 2, 2, 5]), axis=0, initial=1),
        sample(real(5, 3), "prod", lengths=LENGTHS, axis=0),
    ],
}

CASES = {**READS, **WRITES, **OTHERS}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("op", CASES)
def test_indexing_can_be_cut_as_its_rules_say(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 3))


def test_every_rule_of_indexing_is_verified() -> None:
    modules = (advanced, grouped, indexing, replace_view)
    embeddings = {op for op in indexing.RULES if op.startswith("aten.embedding")}
    histograms = {op for op in reductions.RULES if "histogram" in op}

    rules = {op for module in modules for op in module.RULES}
    assert set(CASES) == (rules - embeddings) | histograms


def test_gather_has_these_signatures() -> None:
    found = claims("aten.gather.default", real(5, 7), 1, whole(0, 7, 5, 4))

    assert found == {
        (S(0), S(0)): (S(0),),
        (S(1), B): (P,),
        (B, S(1)): (S(1),),
        (P, B): (P,),
        (P("max"), B): (P("max"),),
        (P("min"), B): (P("min"),),
        (B, B): (B,),
    }


def test_gather_along_a_split_dim_reads_what_each_rank_has() -> None:
    tensor, index = real(7, 3), whole(0, 7, 5, 3)

    made = on_each_rank("aten.gather.default", [tensor, 0, index], [S(0), B], [P], 3)

    assert torch.allclose(sum(made), tensor.gather(0, index))
    assert not made[0][index >= 3].any()
    assert not made[2][index < 5].any()


def test_booleans_that_are_gathered_along_a_split_dim_are_joined_by_or() -> None:
    found = claims("aten.gather.default", truth(5, 7), 1, whole(0, 7, 5, 4))

    assert found[S(1), B] == (P("max"),)


def test_a_short_index_may_be_split_where_the_tensor_is_whole() -> None:
    tensor, index = real(7, 5), whole(0, 7, 2, 4)

    made = on_each_rank("aten.gather.default", [tensor, 0, index], [B, S(1)], [S(1)], 3)

    assert torch.equal(torch.cat(made, 1), tensor.gather(0, index))
    assert (S(1), S(1)) not in claims("aten.gather.default", tensor, 0, index)


@pytest.mark.parametrize(
    ("indices", "free", "index_dim"),
    [
        ([None, whole(0, 3, 2), whole(0, 4, 2)], (S(0), S(0)), S(1)),
        ([whole(0, 5, 2), None, whole(0, 4, 2)], (S(1), S(1)), S(0)),
        ([whole(0, 5, 2)], (S(2), S(2)), S(0)),
    ],
)
def test_dims_of_indices_stand_in_front_unless_the_indices_are_neighbours(
    indices: list[torch.Tensor | None], free: tuple[Sbp, Sbp], index_dim: Sbp
) -> None:
    count = sum(entry is not None for entry in indices)

    found = claims("aten.index.Tensor", real(5, 3, 4), indices)

    assert found[free[0], *[B] * count] == (free[1],)
    assert found[B, *[S(0)] * count] == (index_dim,)


def test_what_a_mask_reads_stays_whole_and_says_why() -> None:
    found = claims("aten.index.Tensor", real(5, 3), [truth(5)])

    assert (S(0), S(0)) not in found
    assert found[S(1), B] == (S(1),)


def test_a_tensor_that_is_filled_under_a_mask_may_be_split_with_it() -> None:
    found = claims("aten.index_put.default", real(5, 3), [truth(5)], real())

    assert found[S(0), S(0), B] == (S(0),)
    assert found[S(1), B, B] == (S(1),)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_index_put_into_split_rows_drops_what_goes_elsewhere(accumulate: bool, size: int) -> None:
    tensor, values = real(7, 3), real(4, 3)
    rows = torch.tensor([0, 3, -1, 4]) if not accumulate else torch.tensor([0, 3, -1, 3])
    expected = tensor.index_put((rows,), values, accumulate)

    args = [tensor, [rows], values, accumulate]
    made = on_each_rank("aten.index_put.default", args, [S(0), B, B], [S(0)], size)

    assert torch.allclose(torch.cat(made), expected)


def _experts(ends: Sequence[int], size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    tokens, weights = single(12, 8), single(4, 8, 4)
    expected = torch.ops.aten._grouped_mm.default(tokens, weights, groups(*ends))
    args = [tokens, weights, groups(*ends)]
    return on_each_rank("aten._grouped_mm.default", args, [B, S(0), B], [P], size), expected


@pytest.mark.parametrize("ends", [(3, 5, 9, 12), (0, 0, 12, 12), (12, 12, 12, 12), (0, 0, 0, 12)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_experts_may_be_split_and_give_zeros_for_tokens_of_others(
    ends: tuple[int, ...], size: int
) -> None:
    made, expected = _experts(ends, size)

    assert torch.allclose(sum(made), expected, atol=1e-5)


def test_grouped_products_split_tokens_experts_and_both_widths() -> None:
    found = claims("aten._grouped_mm.default", single(12, 8), single(3, 8, 16), groups(3, 3, 12))

    assert found == {
        (S(0), B, B): (S(0),),
        (B, S(2), B): (S(1),),
        (S(1), S(1), B): (P,),
        (B, S(0), B): (P,),
        (P, B, B): (P,),
        (B, P, B): (P,),
        (B, B, B): (B,),
    }
