"""Every rule, verified by execution in float64: even, uneven and empty shards, and 2-D meshes."""

from __future__ import annotations

import pytest
import torch

from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(7)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return whole(2, *shape).bool()


def _layer_norm_backward(mask: list[bool], *, affine: bool = True) -> Sample:
    x, weight = real(4, 3, 5), real(5) if affine else None
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [5], weight, weight, 1e-5)
    return sample(real(4, 3, 5), x, [5], mean, rstd, weight, weight, mask)


def _log_softmax_backward(dim: int) -> Sample:
    return sample(real(4, 5), real(4, 5).log_softmax(dim), dim, torch.float64)


def _nll_backward(reduction: int, *, weighted: bool = False) -> Sample:
    scores, target = real(6, 5), whole(5, 6)
    weight = positive(5) if weighted else None
    made, total = torch.ops.aten.nll_loss_forward.default(scores, target, weight, reduction, 2)
    return sample(torch.randn_like(made), scores, target, weight, reduction, 2, total)


def _attention_backward(*, causal: bool, keys: int) -> Sample:
    query, key, value = real(4, 6, 3, 4), real(4, 6, keys, 4), real(4, 6, keys, 4)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward(query, key, value, 0.0, causal)
    return sample(torch.randn_like(out), query, key, value, out, logsumexp, 0.0, causal)


UNARY = ("abs", "clone", "exp", "gelu", "neg", "relu", "sigmoid", "silu", "tanh")

CASES: dict[str, list[Sample]] = {
    **{f"aten.{name}.default": [sample(real(4, 5)), sample(real())] for name in UNARY},
    "aten._log_softmax.default": [sample(real(4, 5), -1, False), sample(real(4, 5), 0, False)],
    "aten._log_softmax_backward_data.default": [
        _log_softmax_backward(1),
        _log_softmax_backward(0),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [
        sample(real(4, 6, 3, 4), real(4, 6, 5, 4), real(4, 6, 5, 4), 0.0, False),
        sample(real(4, 6, 8, 4), real(4, 6, 8, 4), real(4, 6, 8, 4), 0.0, True),
        sample(
            real(4, 6, 3, 4),
            real(4, 6, 5, 4),
            real(4, 6, 5, 4),
            0.0,
            False,
            attn_mask=real(4, 1, 3, 5),
            scale=0.3,
        ),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [
        _attention_backward(causal=False, keys=5),
        _attention_backward(causal=True, keys=3),
    ],
    "aten._softmax.default": [sample(real(4, 3, 5), 1, False), sample(real(5), 0, False)],
    "aten._softmax_backward_data.default": [
        sample(real(4, 5), real(4, 5).softmax(1), 1, torch.float64)
    ],
    "aten._to_copy.default": [
        sample(whole(9, 4, 5), dtype=torch.float64),
        sample(real(4, 5), dtype=torch.int64),
        sample(real(4, 5), dtype=torch.bool),
    ],
    "aten._unsafe_view.default": [sample(real(6, 4), [2, 3, 4])],
    "aten.add.Scalar": [sample(real(4, 5), 2.0)],
    "aten.add.Tensor": [
        sample(real(4, 1, 5), real(3, 5), alpha=2),
        sample(real(4, 5), 1.5),
        sample(real(4), real()),
    ],
    "aten.addcdiv.default": [sample(real(4, 5), real(4, 5), positive(5), value=0.1)],
    "aten.addcmul.default": [sample(real(4, 5), real(4, 5), real(4, 1), value=0.1)],
    "aten.addmm.default": [
        sample(real(5), real(4, 6), real(6, 5)),
        sample(real(1, 5), real(4, 6), real(6, 5), beta=0.5, alpha=2.0),
        sample(real(4, 1), real(4, 6), real(6, 5)),
        sample(real(), real(4, 6), real(6, 5)),
    ],
    "aten.alias.default": [sample(real(4, 5))],
    "aten.amax.default": [sample(real(8, 7), [1]), sample(real(8, 7), [0], True)],
    "aten.amin.default": [sample(real(8, 7))],
    "aten.arange.default": [sample(7), sample(6, dtype=torch.float64), sample(2.5)],
    "aten.arange.start": [sample(3, 8)],
    "aten.arange.start_step": [sample(1, 12, 2), sample(9, 2, -3), sample(0, 1.5, 0.5)],
    "aten.baddbmm.default": [sample(real(6, 1, 5), real(6, 4, 3), real(6, 3, 5))],
    "aten.bmm.default": [sample(real(6, 4, 3), real(6, 3, 5))],
    "aten.cat.default": [
        sample([real(4, 5), real(4, 2)], 1),
        sample([real(2, 4, 5), real(2, 4, 5), real(2, 4, 5)], -3),
    ],
    "aten.copy.default": [sample(real(4, 5), real(5))],
    "aten.detach.default": [sample(real(4, 5))],
    "aten.div.Scalar": [sample(real(4, 5), 3.0)],
    "aten.div.Tensor": [sample(real(4, 5), positive(4, 1)), sample(whole(9, 4), whole(3, 4) + 1)],
    "aten.dot.default": [sample(real(7), real(7))],
    "aten.embedding.default": [sample(real(5, 4), whole(5, 3, 6)), sample(real(5, 4), whole(5), 2)],
    "aten.embedding_dense_backward.default": [
        sample(real(3, 6, 4), whole(5, 3, 6), 5, -1, False),
        sample(real(3, 6, 4), whole(5, 3, 6), 5, 1, False),
        sample(real(6, 4), whole(5, 6), 5, -1, True),
    ],
    "aten.eq.Tensor": [sample(whole(2, 4, 5), whole(2, 5))],
    "aten.expand.default": [
        sample(real(4, 1), [4, 5]),
        sample(real(4, 1), [-1, 5]),
        sample(real(5), [3, 4, 5]),
        sample(real(), [4]),
    ],
    "aten.fill.Scalar": [sample(real(4, 5), 2.0)],
    "aten.full.default": [sample([4, 5], 2.0, dtype=torch.float64), sample([], 1)],
    "aten.full_like.default": [sample(real(4, 5), 3.0)],
    "aten.gelu_backward.default": [sample(real(4, 5), real(4, 5), approximate="tanh")],
    "aten.lerp.Scalar": [sample(real(4, 5), real(4, 5), 0.1)],
    "aten.lerp.Tensor": [sample(real(4, 5), real(4, 5), real(5))],
    "aten.masked_fill.Scalar": [
        sample(real(4, 5), truth(5), 0.0),
        sample(real(4, 5), truth(5), -9.0),
    ],
    "aten.maximum.default": [sample(real(4, 5), real(5))],
    "aten.mean.default": [sample(real(4, 5))],
    "aten.mean.dim": [sample(real(4, 5, 3), [1]), sample(real(4, 5), [-1, 0], True)],
    "aten.mm.default": [sample(real(4, 6), real(6, 5)), sample(whole(9, 4, 6), whole(9, 6, 5))],
    "aten.mse_loss.default": [sample(real(4, 5), real(4, 5), red) for red in (0, 1, 2)],
    "aten.mse_loss_backward.default": [
        sample(real(4, 5), real(4, 5), real(4, 5), 0),
        sample(real(), real(4, 5), real(4, 5), 1),
        sample(real(), real(4, 5), real(4, 5), 2),
    ],
    "aten.mul.Scalar": [sample(real(4, 5), -3.0)],
    "aten.mul.Tensor": [
        sample(real(4, 5), real(5)),
        sample(real(4, 5), 2.0),
        sample(real(4, 5), truth(4, 5)),
    ],
    "aten.mv.default": [sample(real(4, 6), real(6))],
    "aten.native_layer_norm.default": [
        sample(real(4, 3, 5), [5], real(5), real(5), 1e-5),
        sample(real(4, 3, 5), [3, 5], real(3, 5), None, 1e-5),
        sample(real(4, 3, 5), [5], None, real(5), 1e-5),
        sample(real(4, 5), [5], None, None, 1e-5),
    ],
    "aten.native_layer_norm_backward.default": [
        _layer_norm_backward([True, True, True]),
        _layer_norm_backward([True, True, False]),
        _layer_norm_backward([True, False, False], affine=False),
    ],
    "aten.new_full.default": [sample(real(4), [3, 5], 2.0)],
    "aten.new_ones.default": [sample(real(4), [3, 5])],
    "aten.new_zeros.default": [sample(real(4), [3, 5])],
    "aten.nll_loss_backward.default": [
        _nll_backward(0),
        _nll_backward(1, weighted=True),
        _nll_backward(2),
    ],
    "aten.nll_loss_forward.default": [
        *(sample(real(6, 5), whole(5, 6), None, red, 2) for red in (0, 1, 2)),
        sample(real(6, 5), whole(5, 6), positive(5), 2, -100),
        sample(real(5), whole(5), None, 1, -100),
    ],
    "aten.ones.default": [sample([4, 5])],
    "aten.ones_like.default": [sample(real(4, 5)), sample(real())],
    "aten.permute.default": [sample(real(4, 5, 3), [2, 0, -2])],
    "aten.pow.Tensor_Scalar": [sample(positive(4, 5), 1.5)],
    "aten.reshape.default": [sample(real(6, 4), [3, 8]), sample(real(6, 4), [-1])],
    "aten.rsqrt.default": [sample(positive(4, 5))],
    "aten.rsub.Scalar": [sample(real(4, 5), 1.0)],
    "aten.scalar_tensor.default": [sample(2.0)],
    "aten.select.int": [sample(real(4, 5, 3), 1, -1)],
    "aten.select_backward.default": [sample(real(4, 3), [4, 5, 3], 1, 2)],
    "aten.sigmoid_backward.default": [sample(real(4, 5), real(4, 5))],
    "aten.silu_backward.default": [sample(real(4, 5), real(4, 5))],
    "aten.slice.Tensor": [
        sample(real(4, 5), 1, 1, 4),
        sample(real(4, 5), 0, 0, 9223372036854775807),
        sample(real(4, 5), 0, 0, 4),
        sample(real(4, 5), -1, 0, 9223372036854775807, 2),
    ],
    "aten.slice_backward.default": [
        sample(real(4, 3), [4, 5], 1, 1, 4, 1),
        sample(real(4, 5), [4, 5], 0, 0, 9223372036854775807, 1),
    ],
    "aten.split.Tensor": [sample(real(4, 6), 2, 1), sample(real(4, 6), 5, -1), sample(real(4), 9)],
    "aten.split_with_sizes.default": [sample(real(4, 6), [1, 5], 1)],
    "aten.sqrt.default": [sample(positive(4, 5))],
    "aten.squeeze.dim": [sample(real(4, 1, 3), 1), sample(real(4, 2, 3), -2)],
    "aten.stack.default": [sample([real(4, 5), real(4, 5)], 1), sample([real(3)], -1)],
    "aten.sub.Tensor": [sample(real(4, 5), real(5))],
    "aten.sum.default": [sample(real(4, 5)), sample(truth(4, 5))],
    "aten.sum.dim_IntList": [
        sample(real(4, 5, 3), [0, -1]),
        sample(real(4, 5), [1], True),
        sample(real(4, 5), None),
    ],
    "aten.t.default": [sample(real(4, 5)), sample(real(4))],
    "aten.tanh_backward.default": [sample(real(4, 5), real(4, 5))],
    "aten.threshold_backward.default": [sample(real(4, 5), real(4, 5), 0)],
    "aten.transpose.int": [sample(real(4, 5, 3), 0, -1)],
    "aten.unbind.int": [sample(real(4, 3), 1)],
    "aten.unsqueeze.default": [sample(real(4, 5), -1), sample(real(4, 5), 1)],
    "aten.view.default": [
        sample(real(6, 4), [2, 3, 4]),
        sample(real(2, 3, 4), [6, 4]),
        sample(real(6, 4), [4, 6]),
        sample(real(4, 1, 6), [4, 2, 3, 1]),
        sample(real(4, 6), [4, -1, 2]),
        sample(real(0, 6), [3, 0]),
        sample(real(1, 1), []),
    ],
    "aten.where.ScalarOther": [
        sample(truth(4, 5), real(5), 0),
        sample(truth(4, 5), real(5), 2.0),
    ],
    "aten.where.ScalarSelf": [sample(truth(4, 5), 0.0, real(4, 5))],
    "aten.where.self": [sample(truth(4, 1), real(4, 5), real(5))],
    "aten.zeros.default": [sample([4, 5], dtype=torch.float64)],
    "aten.zeros_like.default": [sample(real(4, 5))],
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    check_rule(op, CASES[op])


def test_accumulation_over_micro_batches_is_pointwise_and_linear() -> None:
    def scaled(_op: str, args: list[object], _kwargs: object) -> object:
        return args[0] * args[1]  # one micro-batch

    (report,) = check_rule("sbp.accumulate", [sample(real(4, 5), 0.25)], execute=scaled)

    assert "(P) -> (P)" in {str(claim.signature) for claim in report.claimed}


@pytest.mark.parametrize("op", ["aten.gelu.default", "aten.mm.default"])
def test_a_float32_sample_passes_too(op: str) -> None:
    check_rule(op, [sample(*(entry.float() for entry in CASES[op][0][0]))])
