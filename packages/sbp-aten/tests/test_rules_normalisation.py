"""Softmax and the norms: every rule by execution, and the splits that the few need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from sbp_aten.rules.normalisation import RULES
from sbp_core.signatures import derive
from sbp_torch.signatures.verification import call_of, run_op, verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(29)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


RMS_BACKWARD = "aten._fused_rms_norm_backward.default"


def execute(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator; the one that CPUs lack is written out."""
    if op != RMS_BACKWARD:
        return run_op(op, args, kwargs)
    gradient, x, shape, rstd, weight, mask = args
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    normalised = x * rstd
    scaled = gradient if weight is None else gradient * weight
    mean = (scaled * normalised).mean(inner, keepdim=True)
    made = ((scaled - normalised * mean) * rstd, (gradient * normalised).sum(outer))
    return tuple(entry for entry, wanted in zip(made, mask, strict=True) if wanted)


def softmax_backward(op: str, dim: int) -> Sample:
    made = run_op(op, (real(5, 3), dim, False), {})
    return sample(real(5, 3), made, dim, torch.float64)


def layer_backward(mask: list[bool], *, affine: bool = True) -> Sample:
    x, weight = real(5, 2, 3), real(3) if affine else None
    _, mean, rstd = run_op("aten.native_layer_norm.default", (x, [3], weight, weight, 1e-5), {})
    return sample(real(5, 2, 3), x, [3], mean, rstd, weight, weight, mask)


def rms_backward(mask: list[bool]) -> Sample:
    x, weight = real(5, 3), real(3)
    _, rstd = run_op("aten._fused_rms_norm.default", (x, [3], weight, 1e-5), {})
    return sample(real(5, 3), x, [3], rstd, weight, mask)


def group_norm(*shape: int, groups: int, affine: bool = True) -> Sample:
    x, weight = real(*shape), real(shape[1]) if affine else None
    area = x[0, 0].numel()
    return sample(x, weight, weight, shape[0], shape[1], area, groups, 1e-5)


def group_backward(*shape: int, groups: int, mask: list[bool]) -> Sample:
    args, _ = group_norm(*shape, groups=groups)
    _, mean, rstd = run_op("aten.native_group_norm.default", args, {})
    return sample(real(*shape), args[0], mean, rstd, args[1], *args[3:7], mask)


def batch(*settings: object, running: bool = True, bias: bool = True) -> Sample:
    """Return a batch norm of 5 samples, 3 channels, 2 positions."""
    statistics = (real(3), positive(3)) if running else ()
    return sample(real(5, 3, 2), real(3), real(3) if bias else None, *statistics, *settings)


def batch_backward(*, training: bool, mask: list[bool], reserve: bool = False) -> Sample:
    x, empty = real(5, 3, 2), torch.empty(0, dtype=torch.float64)
    saved = (x.mean((0, 2)), 1 / (x.var((0, 2), correction=0) + 1e-5).sqrt())
    statistics = saved if training else (empty, empty)
    behind = [torch.empty(0, dtype=torch.uint8)] if reserve else []
    return sample(
        real(5, 3, 2), x, real(3), real(3), positive(3), *statistics, training, 1e-5, mask, *behind
    )


def by_name(case: Sample, *names: str) -> Sample:
    """Return a call whose last arguments are given by name."""
    args, kwargs = case
    count = len(args) - len(names)
    return sample(*args[:count], **dict(zip(names, args[count:], strict=True)), **kwargs)


def weight_backward(dim: int) -> Sample:
    v = real(5, 3)
    g = real(5, 1) if dim == 0 else real(1, 3)
    _, norms = run_op("aten._weight_norm_interface.default", (v, g, dim), {})
    return sample(real(5, 3), v, g, norms, dim)


SOFTMAX = [sample(real(5, 3), 1, False), sample(real(2, 5, 3), 0, False), sample(real(), 0, False)]
WANTED = ([True, True, True], [True, False, False], [False, True, True])

CASES: dict[str, list[Sample]] = {
    "aten._batch_norm_no_update.default": [batch(0.1, 1e-5)],
    "aten._batch_norm_with_update_functional.default": [batch(0.1, 1e-5)],
    "aten._fused_rms_norm.default": [
        sample(real(5, 3), [3], real(3), 1e-5),
        sample(real(2, 5, 3), [5, 3], None, None),
    ],
    RMS_BACKWARD: [rms_backward([True, True]), rms_backward([False, True])],
    "aten._log_softmax.default": SOFTMAX,
    "aten._log_softmax_backward_data.default": [
        softmax_backward("aten._log_softmax.default", dim) for dim in (1, 0)
    ],
    "aten._native_batch_norm_legit.default": [
        batch(False, 0.1, 1e-5),
        batch(False, 0.1, 1e-5, bias=False),
    ],
    "aten._native_batch_norm_legit.no_stats": [batch(True, 0.1, 1e-5, running=False)],
    "aten._native_batch_norm_legit_functional.default": [
        batch(training, momentum, 1e-5) for training in (True, False) for momentum in (0.1, 1.5)
    ],
    "aten._native_batch_norm_legit_no_training.default": [
        batch(0.1, 1e-5),
        batch(0.1, 1e-5, bias=False),
    ],
    "aten._safe_softmax.default": [sample(real(5, 3), -1), sample(real(5, 3), 0)],
    "aten._softmax.default": SOFTMAX,
    "aten._softmax_backward_data.default": [
        softmax_backward("aten._softmax.default", dim) for dim in (1, 0)
    ],
    "aten._weight_norm_interface.default": [
        sample(real(5, 3), real(5, 1), 0),
        sample(real(5, 3), real(1, 3), 1),
    ],
    "aten._weight_norm_interface_backward.default": [weight_backward(0), weight_backward(1)],
    "aten.batch_norm_backward.default": [
        batch_backward(training=True, mask=[True] * 3, reserve=True),
        batch_backward(training=False, mask=[True] * 3, reserve=True),
        by_name(
            batch_backward(training=True, mask=[True] * 3, reserve=True),
            *("save_mean", "save_var", "update", "eps", "output_mask", "reserve"),
        ),
    ],
    "aten.native_batch_norm.default": [batch(False, 0.1, 1e-5), batch(True, 0.1, 1e-5)],
    "aten.native_batch_norm_backward.default": [
        batch_backward(training=training, mask=mask)
        for training in (True, False)
        for mask in WANTED
    ],
    "aten.native_group_norm.default": [
        group_norm(5, 6, 2, groups=3),
        group_norm(2, 5, groups=5),
        group_norm(3, 4, 2, 2, groups=2, affine=False),
    ],
    "aten.native_group_norm_backward.default": [
        group_backward(5, 6, 2, groups=3, mask=[True, True, True]),
        group_backward(2, 4, groups=2, mask=[False, True, True]),
    ],
    "aten.native_layer_norm.default": [
        sample(real(5, 3), [3], real(3), real(3), 1e-5),
        sample(real(2, 5, 3), [5, 3], real(5, 3), None, 1e-5),
        sample(real(5, 3), [3], None, real(3), 1e-5),
    ],
    "aten.native_layer_norm_backward.default": [
        *(layer_backward(mask) for mask in WANTED),
        layer_backward([True, False, False], affine=False),
    ],
}


def test_every_rule_has_a_case():
    covered = set(CASES)

    assert covered == set(RULES)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("op", sorted(CASES))
def test_execution_confirms_every_signature(op: str):
    reports = [
        verify(op, *args, isolated=False, execute=execute, **kwargs) for args, kwargs in CASES[op]
    ]

    assert all(report.ok for report in reports), "\n".join(map(str, reports))


def legal(op: str, case: Sample, axis_size: int = 2) -> set[str]:
    args, kwargs = case
    call, _ = call_of(op, args, kwargs)
    return {str(entry) for entry in derive(call, axis_size)}


def test_layer_norm_has_partial_weight_gradients_where_rows_are_split():
    case = layer_backward([True, True, True])

    found = legal("aten.native_layer_norm_backward.default", case)

    assert "S(0), S(0), S(0), S(0), B, B -> S(0), P, P" in found
    assert "P, B, B, B, B, B -> P, P, P" in found
    assert "B, B, B, B, P, B -> P, B, B" in found
    assert not any("S(2)" in entry for entry in found)


def test_layer_norm_is_jointly_linear_in_weight_and_bias():
    case = CASES["aten.native_layer_norm.default"][0]

    found = legal("aten.native_layer_norm.default", case)

    assert "B, P, P -> P, B, B" in found
    assert "B, P, B -> P, B, B" not in found
    assert 'B, B, P("max") -> P("max"), B, B' in found


def test_group_norm_splits_channels_between_groups_only():
    case = group_norm(5, 6, 2, groups=3)
    split = "S(1), S(0), S(0) -> S(1), S(1), S(1)"

    assert split in legal("aten.native_group_norm.default", case, axis_size=3)
    assert split not in legal("aten.native_group_norm.default", case, axis_size=2)
    assert "S(0), B, B -> S(0), S(0), S(0)" in legal("aten.native_group_norm.default", case)


def test_batch_norm_in_training_splits_channels_only():
    found = legal("aten.native_batch_norm.default", batch(True, 0.1, 1e-5))

    assert "S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0)" in found
    assert not any(entry.startswith(("S(0)", "S(2)")) for entry in found)


def test_batch_norm_in_evaluation_splits_batch_and_positions_too():
    found = legal("aten.native_batch_norm.default", batch(False, 0.1, 1e-5))

    assert "S(0), B, B, B, B -> S(0), B, B" in found
    assert "S(2), B, B, B, B -> S(2), B, B" in found
    assert "P, B, P, P, B -> P, B, B" in found


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_sums_weight_gradients_over_shards_of_the_batch_if_statistics_are_given(
    training: bool,
):
    case = batch_backward(training=training, mask=[not training, True, True])

    found = legal("aten.native_batch_norm_backward.default", case)

    made = "P, P" if training else "S(0), P, P"
    assert f"S(0), S(0), B, B, B, B, B -> {made}" in found


def test_running_statistics_grow_with_the_old_ones_unless_the_momentum_exceeds_1():
    op = "aten._native_batch_norm_legit_functional.default"
    grows = 'B, B, B, P("max"), B -> B, B, B, P("max"), B'

    assert grows in legal(op, batch(True, 0.1, 1e-5))
    assert grows not in legal(op, batch(True, 1.5, 1e-5))
