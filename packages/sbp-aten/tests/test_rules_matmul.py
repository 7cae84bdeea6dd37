"""Products and distances under every split, against one device; and their exact signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest
import torch

from sbp_aten.rules import matmul
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.sbp import B, NdSbp, P, Partial, S
from sbp_core.signatures import OpCall, derive, enumerate_signatures, legal_signatures, work_flop
from sbp_torch.signatures.verification import abstract_call, run_op
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(23)

SCALED = "aten._scaled_mm.default"

MAX, MIN = Partial("max"), Partial("min")


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_draw) < 0.5


def _cdist_backward(norm: float) -> Sample:
    left, right = real(3, 5, 4), real(3, 7, 4)
    made = torch.ops.aten._cdist_forward.default(left, right, norm, None)
    return sample(torch.randn_like(made), left, right, norm, made)


def _pdist_backward(norm: float) -> Sample:
    rows = real(5, 4)
    made = torch.ops.aten._pdist_forward.default(rows, norm)
    return sample(torch.randn_like(made), rows, norm, made)


CASES: dict[str, list[Sample]] = {
    "aten._addmm_activation.default": [sample(real(5), real(3, 4), real(4, 5), use_gelu=True)],
    "aten._cdist_backward.default": [_cdist_backward(norm) for norm in (0.0, 1.0, 2.0, inf)],
    "aten._cdist_forward.default": [
        *(sample(real(3, 5, 4), real(3, 7, 4), norm, None) for norm in (0.0, 1.0, 2.5, inf)),
        sample(real(2, 1, 5, 4), real(3, 2, 4), 2.0, None),
    ],
    "aten._euclidean_dist.default": [sample(real(5, 4), real(7, 4))],
    "aten._int_mm.default": [sample(whole(5, 4).to(torch.int8), whole(4, 7).to(torch.int8))],
    "aten._pdist_backward.default": [_pdist_backward(norm) for norm in (0.0, 1.0, 2.0, inf)],
    "aten._pdist_forward.default": [sample(real(5, 4), norm) for norm in (0.0, 1.0, 2.0, inf)],
    "aten._trilinear.default": [
        sample(real(4, 3), real(5, 3, 2), real(4, 2), [1, 3], [0], [1, 2], [2, 3]),
        sample(real(4, 1), real(3), real(4, 3), [], [0], [], [0], 0),
    ],
    "aten.addbmm.default": [sample(real(5), real(3, 4, 2), real(3, 2, 5), beta=0.5, alpha=2.0)],
    "aten.addmm.default": [
        sample(real(5), real(4, 3), real(3, 5)),
        sample(real(4, 1), real(4, 3), real(3, 5), beta=-0.5, alpha=2.0),
        sample(real(4, 5), real(4, 3), real(3, 5), beta=0),
        sample(whole(), whole(4, 3), whole(3, 5), beta=2),
    ],
    "aten.addmv.default": [
        sample(real(5), real(5, 3), real(3)),
        sample(real(1), real(5, 3), real(3), beta=0.5),
    ],
    "aten.addr.default": [
        sample(real(5, 3), real(5), real(3), beta=-1.0),
        sample(real(3), real(5), real(3)),
        sample(truth(5, 3), truth(5), truth(3)),
    ],
    "aten.baddbmm.default": [
        sample(real(4, 5), real(3, 4, 2), real(3, 2, 5)),
        sample(real(3, 1, 5), real(3, 4, 2), real(3, 2, 5), beta=0),
        sample(whole(1), whole(3, 4, 2), whole(3, 2, 5), beta=0.6),
    ],
    "aten.bmm.default": [sample(real(5, 4, 3), real(5, 3, 2))],
    "aten.dot.default": [sample(real(7), real(7)), sample(whole(5), whole(5))],
    "aten.linalg_cross.default": [
        sample(real(5, 3), real(1, 3)),
        sample(real(3, 4, 2), real(3, 4, 2), dim=-3),
    ],
    "aten.linear.default": [
        sample(real(3, 5, 4), real(6, 4), real(6)),
        sample(real(3, 4), real(6, 4)),
    ],
    "aten.matmul.default": [
        sample(real(3, 5, 4), real(4, 6)),
        sample(real(2, 1, 5, 4), real(3, 4, 6)),
        sample(real(4), real(3, 4, 6)),
        sample(real(3, 5, 4), real(4)),
    ],
    "aten.mm.default": [
        sample(real(5, 7), real(7, 3)),
        sample(whole(5, 2), whole(2, 3)),
        sample(real(4, 3).to(torch.complex128), real(3, 2).to(torch.complex128)),
    ],
    "aten.mv.default": [sample(real(5, 7), real(7))],
    "aten.tensordot.default": [
        sample(real(3, 5, 4), real(3, 5, 6), [0, 1], [0, 1]),
        sample(real(3, 5, 4), real(6, 4, 3), [-1, 0], [1, 2]),
    ],
    "aten.vdot.default": [sample(torch.complex(real(5), real(5)), torch.complex(real(5), real(5)))],
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_cut_of_a_product_gives_what_one_device_gives(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 7))


def test_every_rule_of_products_and_distances_is_tested() -> None:
    assert {*CASES, SCALED} == {*matmul.RULES}


def _in_float8(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a scaled product, whose factors are given in float32, in float8."""
    factors = [factor.to(torch.float8_e4m3fn) for factor in args[:2]]
    return run_op(op, [*factors, *args[2:]], kwargs)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_scales_go_with_their_rows_and_columns(by_row: bool, biased: bool) -> None:
    if by_row and torch.__version__ < (2, 13):
        pytest.skip(f"on CPUs, PyTorch {torch.__version__} scales a product by one number only")
    factors = real(16, 32).float(), real(32, 48).float()
    scales = (real(16, 1), real(1, 48)) if by_row else (real().abs(), real().abs())
    bias = real(48).float() if biased else None
    call = sample(*factors, *(scale.float() for scale in scales), bias, None, torch.float32)

    check_rule(SCALED, [call], axis_sizes=(2, 5), execute=_in_float8)


def test_scales_of_blocks_keep_a_product_whole() -> None:
    shapes = [(16, 256), (256, 48), (16, 2), (2, 48)]
    kinds = ["float8_e4m3fn"] * 2 + ["float32"] * 2
    inputs = tuple(TensorType(shape, kind) for shape, kind in zip(shapes, kinds, strict=True))
    names = tuple("xwab")
    call = OpCall(
        op=SCALED,
        args=tuple(map(Ref, names)),
        inputs=inputs,
        tensor_names=names,
        outputs=(TensorType((16, 48), "bfloat16"),),
    )

    assert [part.origin for part in derive(call, 2)] == ["all B"]


def test_matmul_has_exactly_its_six_signatures() -> None:
    found = {
        (part.inputs, part.outputs) for part in legal_signatures("aten.mm.default", (8, 6), (6, 4))
    }

    assert found == {
        ((S(0), B), (S(0),)),
        ((B, S(1)), (S(1),)),
        ((S(1), S(0)), (P,)),
        ((P, B), (P,)),
        ((B, P), (P,)),
        ((B, B), (B,)),
    }


@pytest.mark.parametrize(
    ("x", "w", "y"),
    [
        (NdSbp(S(0), B), NdSbp(B, S(1)), NdSbp(S(0), S(1))),
        (NdSbp(S(0), S(1)), NdSbp(B, S(0)), NdSbp(S(0), P)),
    ],
    ids=["column model parallel", "row model parallel"],
)
def test_the_two_dimensional_examples_of_oneflow_come_out(x: NdSbp, w: NdSbp, y: NdSbp) -> None:
    call = abstract_call("aten.mm.default", [(8, 6), (6, 4)], {})

    found = [(part.inputs, part.outputs) for part in enumerate_signatures(call, (2, 2))]

    assert ((x, w), (y,)) in found


def test_a_bias_has_to_be_partial_beside_a_split_contraction() -> None:
    found = {
        part.outputs: part.inputs
        for part in legal_signatures("aten.addmm.default", (4,), (8, 6), (6, 4))
        if part.label == "k"
    }

    assert found == {(P,): (P, S(1), S(0))}


def test_a_bias_times_zero_is_not_read() -> None:
    found = {
        (part.inputs, part.outputs)
        for part in legal_signatures("aten.addmm.default", (8, 4), (8, 6), (6, 4), beta=0)
    }

    assert ((B, S(1), S(0)), (P,)) in found
    assert ((P, B, B), (B,)) in found


@pytest.mark.parametrize(("beta", "after"), [(1, MAX), (-1, MIN)])
def test_a_product_grows_or_falls_with_its_bias(beta: int, after: Partial) -> None:
    found = legal_signatures("aten.addmm.default", (4,), (8, 6), (6, 4), beta=beta)

    assert ((MAX, B, B), (after,)) in {(part.inputs, part.outputs) for part in found}


def test_bytes_that_are_partial_sums_may_not_be_multiplied_into_wide_integers() -> None:
    rows, columns = CASES["aten._int_mm.default"][0][0]

    found = {
        (part.inputs, part.outputs)
        for part in legal_signatures("aten._int_mm.default", rows, columns)
    }

    assert ((S(1), S(0)), (P,)) in found
    assert not any(P in inputs for inputs, _ in found)


def test_a_maximum_over_columns_is_a_partial_maximum_and_a_root_needs_them_whole() -> None:
    by_norm = {
        norm: {
            part.outputs
            for part in legal_signatures("aten._cdist_forward.default", (5, 4), (7, 4), norm, None)
            if part.label == "m"
        }
        for norm in (1.0, 2.0, inf)
    }

    assert by_norm == {1.0: {(P,)}, 2.0: set(), inf: {(MAX,)}}


def test_the_work_of_a_product_does_not_hang_on_its_bias() -> None:
    bias = abstract_call("aten.addmm.default", [(4,), (8, 6), (6, 4)], {"beta": 0})
    plain = abstract_call("aten.mm.default", [(8, 6), (6, 4)], {})

    assert work_flop(bias) == work_flop(plain) == 2 * 8 * 6 * 4
