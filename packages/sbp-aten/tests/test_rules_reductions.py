"""Reductions, scans and sorting: every rule by execution, and what those that matter most allow."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from sbp_aten.rules import reductions, scans
from sbp_core.signatures import legal_signatures
from sbp_torch.signatures.verification import verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(23)

RULES = {**reductions.RULES, **scans.RULES}


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return whole(2, *shape).bool()


def narrow(*shape: int) -> torch.Tensor:
    return whole(3, *shape).to(torch.uint8)


SPREAD = [sample(real(5, 3), [1]), sample(real(5, 3), None, correction=0, keepdim=True)]
SPREAD_DIM = [sample(real(5, 3), [-1], True), sample(real(2, 3, 5), [0, 2], False, True)]
LOGICAL = [sample(truth(5, 3)), sample(real(1, 2)), sample(narrow(5)), sample(truth())]
LOGICAL_DIM = [sample(truth(5, 3), 0), sample(narrow(2, 5), -1, True), sample(real(5, 2), 1)]
LOGICAL_DIMS = [sample(truth(5, 3), [0, 1]), sample(real(5, 3), []), sample(truth(2, 3))]
EXTREME = [sample(real(5, 3), [1]), sample(whole(9, 2, 5), [], True), sample(real(), [0])]
ALL = [sample(real(5, 3)), sample(whole(9, 2, 1)), sample(real())]
INDEXED = [sample(real(5, 3), 1), sample(whole(9, 2, 5), -2, True), sample(real(1, 3), 0)]
INDEX = [sample(real(5, 3), 1), sample(real(5, 3)), sample(real(2, 1), -1, True)]
NORM_DIM = [
    sample(real(5, 3), 1, [1]),
    sample(real(5, 3), inf, [0], True),
    sample(real(5, 3), -inf, [0, 1]),
    sample(whole(2, 5, 3).double(), 0, [1]),
    sample(real(5, 3), 2, [-1]),
]
ALONG = [sample(real(5, 3), 1), sample(whole(4, 2, 5), 0), sample(real(1, 3), 0), sample(real(), 0)]
SORTED = [sample(real(5, 3)), sample(real(5, 3), 0, True), sample(real(2, 1), -1)]
DISTINCT = [sample(whole(3, 5))]

CASES: dict[str, list[Sample]] = {
    "aten._logcumsumexp.default": [sample(real(5, 3), 1)],
    "aten._unique.default": DISTINCT,
    "aten._unique2.default": DISTINCT,
    "aten.all.default": LOGICAL,
    "aten.all.dim": LOGICAL_DIM,
    "aten.all.dims": LOGICAL_DIMS,
    "aten.amax.default": EXTREME,
    "aten.amin.default": EXTREME,
    "aten.aminmax.default": [sample(real(5, 3)), sample(real(2, 5), dim=-1, keepdim=True)],
    "aten.any.default": LOGICAL,
    "aten.any.dim": LOGICAL_DIM,
    "aten.any.dims": LOGICAL_DIMS,
    "aten.argmax.default": INDEX,
    "aten.argmin.default": INDEX,
    "aten.bincount.default": [
        sample(whole(4, 5)),
        sample(whole(4, 2), real(2), 6),
        sample(whole(4, 5), whole(3, 5)),
    ],
    "aten.count_nonzero.default": [sample(whole(2, 5, 3)), sample(whole(2, 5, 3), 1)],
    "aten.count_nonzero.dim_IntList": [sample(whole(2, 5, 3), [0, -1]), sample(truth(2), [])],
    "aten.cummax.default": ALONG,
    "aten.cummin.default": ALONG,
    "aten.cumprod.default": [*ALONG, sample(truth(5, 2), 0)],
    "aten.cumsum.default": [*ALONG, sample(real(5, 2), 1, dtype=torch.int64)],
    "aten.dist.default": [
        sample(real(5, 3), real(3), 1),
        sample(real(5, 3), real(5, 1), inf),
        sample(real(2, 3), real(2, 3)),
    ],
    "aten.hash_tensor.default": [sample(whole(9, 5, 3), [1])],
    "aten.histc.default": [sample(real(5, 3), 4, -1, 1), sample(real(5), 4)],
    "aten.kthvalue.default": [sample(real(5, 3), 2), sample(real(5, 3), 1, 0, True)],
    "aten.linalg_vector_norm.default": [
        *NORM_DIM,
        sample(real(5, 3)),
        sample(torch.complex(real(5, 2), real(5, 2)), 1, None, True),
    ],
    "aten.logcumsumexp.default": [sample(real(5, 3), 1), sample(real(5, 1), -1)],
    "aten.logsumexp.default": [sample(real(5, 3), [1]), sample(real(5, 1), [-1], True)],
    "aten.max.default": ALL,
    "aten.max.dim": INDEXED,
    "aten.mean.default": [sample(real(5, 3)), sample(real(2, 1)), sample(real(0, 3))],
    "aten.mean.dim": [
        sample(real(5, 3), [0]),
        sample(real(2, 5, 3), [0, -1], True),
        sample(real(5, 2).float(), None, dtype=torch.float64),
        sample(real(5, 0), [1]),
    ],
    "aten.median.default": ALL,
    "aten.median.dim": INDEXED,
    "aten.min.default": ALL,
    "aten.min.dim": INDEXED,
    "aten.mode.default": [sample(whole(3, 5, 3)), sample(whole(3, 5, 3), 0, True)],
    "aten.nanmedian.default": ALL,
    "aten.nanmedian.dim": INDEXED,
    "aten.nansum.default": [sample(real(5, 3).sqrt(), [0]), sample(whole(9, 5, 3))],
    "aten.norm.Scalar": [sample(real(5, 3), 1), sample(real(5, 3))],
    "aten.norm.ScalarOpt_dim": NORM_DIM,
    "aten.norm.ScalarOpt_dim_dtype": [
        sample(real(5, 3).float(), 1, [0], False, dtype=torch.float64)
    ],
    "aten.norm.ScalarOpt_dtype": [
        sample(real(5, 3).float(), None, dtype=torch.float64),
        sample(real(5, 3).float(), 1, dtype=torch.float64),
    ],
    "aten.prod.default": [sample(real(5, 3)), sample(truth(5)), sample(real(1))],
    "aten.prod.dim_int": [sample(real(5, 3), 1), sample(truth(2, 5), 0), sample(real(5, 1), 1)],
    "aten.renorm.default": [sample(real(5, 3, 2), 2, 0, 1.0), sample(real(5, 3), 1, -1, 1.0)],
    "aten.sort.default": SORTED,
    "aten.sort.stable": [
        sample(whole(3, 5, 3), stable=True),
        sample(whole(3, 5, 3), stable=True, dim=0),
    ],
    "aten.std.correction": SPREAD,
    "aten.std.default": [sample(real(5, 3))],
    "aten.std.dim": SPREAD_DIM,
    "aten.std_mean.correction": SPREAD,
    "aten.sum.default": [
        sample(real(5, 3)),
        sample(truth(5)),
        sample(truth(1)),
        sample(truth(5), dtype=torch.bool),
    ],
    "aten.sum.dim_IntList": [
        sample(real(5, 3), [1]),
        sample(whole(9, 2, 5), [0], True),
        sample(real(5, 3), [0], dtype=torch.int64),
        sample(real(5, 1), [-1]),
        sample(narrow(5, 3), None),
    ],
    "aten.topk.default": [sample(real(5, 3), 2), sample(real(5, 3), 4, 0), sample(real(2, 1), 1)],
    "aten.unique_consecutive.default": DISTINCT,
    "aten.unique_dim.default": [sample(whole(3, 5, 2), 0)],
    "aten.unique_dim_consecutive.default": [sample(whole(3, 5, 2), 0)],
    "aten.var.correction": SPREAD,
    "aten.var.default": [sample(real(5, 3), False)],
    "aten.var.dim": SPREAD_DIM,
    "aten.var_mean.correction": SPREAD,
}


def test_every_rule_has_a_case():
    covered = set(CASES)

    assert covered == {op for op in RULES if "histogram" not in op}


@pytest.mark.parametrize("op", sorted(CASES))
def test_execution_confirms_every_signature(op: str):
    reports = [verify(op, *args, isolated=False, **kwargs) for args, kwargs in CASES[op]]

    assert all(report.ok for report in reports), "\n".join(map(str, reports))


def legal(op: str, *args: Any, axis_size: int = 2, **kwargs: Any) -> set[str]:
    return {str(entry) for entry in legal_signatures(op, *args, axis_size=axis_size, **kwargs)}


def test_a_mean_of_shards_is_a_partial_sum():
    assert legal("aten.mean.dim", (5, 3), [0]) == {"S(0) -> P", "S(1) -> S(0)", "P -> P", "B -> B"}


def test_a_maximum_of_shards_is_a_partial_maximum_if_all_shards_have_elements():
    assert legal("aten.amax.default", (5, 3), [1]) == {
        "S(0) -> S(0)",
        'S(1) -> P("max")',
        'P("max") -> P("max")',
        "B -> B",
    }
    assert 'S(1) -> P("max")' not in legal("aten.amax.default", (5, 3), [1], axis_size=4)


def test_the_smallest_and_the_largest_are_partial_each_in_its_own_way():
    assert 'S(0) -> P("min"), P("max")' in legal("aten.aminmax.default", (5, 3))


def test_any_is_a_partial_or_and_all_a_partial_and():
    assert legal("aten.any.dim", truth(5, 3), 1) == {
        "S(0) -> S(0)",
        'S(1) -> P("max")',
        'P("max") -> P("max")',
        "B -> B",
    }
    assert 'S(1) -> P("min")' in legal("aten.all.dim", truth(5, 3), 1)
    assert 'P("max") -> P("max")' not in legal("aten.any.dim", real(5, 3), 1)


def test_norms_of_order_0_and_1_add_up_and_infinite_ones_take_the_extreme():
    def contracted(order: float) -> set[str]:
        return {
            entry
            for entry in legal("aten.linalg_vector_norm.default", (4, 6), order, [1])
            if entry.startswith("S(1)")
        }

    assert contracted(0) == contracted(1) == {"S(1) -> P"}
    assert contracted(inf) == {'S(1) -> P("max")'}
    assert contracted(-inf) == {'S(1) -> P("min")'}
    assert contracted(2) == contracted(3) == set()


def test_a_sum_into_unsigned_or_rounded_integers_is_not_linear():
    assert "P -> P" not in legal("aten.sum.default", narrow(5))
    assert "P -> P" not in legal("aten.sum.default", real(5), dtype=torch.int64)
    assert "P -> P" in legal("aten.sum.default", real(5))


def test_a_sum_that_skips_nan_is_linear_in_integers_only():
    assert "P -> P" not in legal("aten.nansum.default", (5, 3))
    assert "P -> P" in legal("aten.nansum.default", whole(9, 5, 3))


def test_one_element_is_its_own_sum_and_maximum_and_has_index_0():
    assert {"P -> P", 'P("min") -> P("min")'} <= legal("aten.amax.default", (5, 1), [1])
    assert {"P -> P, B", 'P("max") -> P("max"), B'} <= legal("aten.max.dim", (5, 1), 1)
    assert "P -> B" in legal("aten.argmax.default", (5, 1), 1)


def test_ranks_without_items_count_into_the_same_bins_and_dtype():
    report = verify(
        "aten.bincount.default", whole(4, 2), whole(3, 2), 7, axis_sizes=(3,), isolated=False
    )

    assert report.ok, str(report)
    assert any(claim.empty for claim in report.claimed)


def test_a_histogram_without_limits_needs_all_elements():
    assert legal("aten.histc.default", (5,), 4) == {"B -> B"}
    assert legal("aten.histc.default", (5,), 4, -1, 1) == {"S(0) -> P", "B -> B"}
