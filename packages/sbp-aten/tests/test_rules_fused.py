"""Our fused optimizer updates: verified by execution, and against `torch.optim` itself."""

from __future__ import annotations

import pytest
import torch

from sbp_aten.rules.foreach import RULES
from sbp_core.signatures import derive
from sbp_torch.ops import fused_updates as _registers  # noqa: F401 - the operators
from sbp_torch.signatures.verification import call_of, verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(18)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


_ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
_PLAIN = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "maximize": False}
_SGD = {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "maximize": False}
_ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": True}


def adam(step: object, *largest: torch.Tensor, decoupled: bool = True) -> Sample:
    tensors = (real(4, 6), real(4, 6), real(4, 6), positive(4, 6), list(largest))
    return sample(*tensors, step, 0.1, decoupled=decoupled, **_ADAM)


CASES: dict[str, list[Sample]] = {
    "sbp.fused_adam.default": [adam(3), adam(1, positive(4, 6), decoupled=False)],
    "sbp.fused_adam.tensor_step": [adam(torch.tensor(3.0))],
    "sbp.fused_sgd.default": [
        sample(real(4, 6), real(4, 6), [], 0.1, nesterov=False, **_PLAIN),
        sample(real(4, 6), real(4, 6), [real(4, 6)], 0.1, nesterov=False, **_SGD),
    ],
    "sbp.fused_adagrad.default": [
        sample(real(4, 6), real(4, 6), positive(4, 6), 3, 0.1, **_ADAGRAD)
    ],
    "sbp.fused_adagrad.tensor_step": [
        sample(real(4, 6), real(4, 6), positive(4, 6), torch.tensor(3.0), 0.1, **_ADAGRAD)
    ],
}


def test_every_rule_has_a_sample() -> None:
    assert set(CASES) == {op for op in RULES if op.startswith("sbp.")}


@pytest.mark.parametrize("op", CASES)
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in CASES[op]:
        report = verify(op, *args, axis_sizes=(2, 3), isolated=False, **kwargs)

        assert report.ok, str(report)


def test_an_adaptive_update_is_split_alike_and_takes_no_parts() -> None:
    args, kwargs = CASES["sbp.fused_adam.default"][0]

    found = {str(entry) for entry in derive(call_of("sbp.fused_adam.default", args, kwargs)[0], 2)}

    assert found == {
        "B, B, B, B -> B, B, B",
        "S(0), S(0), S(0), S(0) -> S(0), S(0), S(0)",
        "S(1), S(1), S(1), S(1) -> S(1), S(1), S(1)",
    }


def test_velocity_and_gradient_may_be_parts_together() -> None:
    args, kwargs = CASES["sbp.fused_sgd.default"][1]

    found = {str(entry) for entry in derive(call_of("sbp.fused_sgd.default", args, kwargs)[0], 2)}

    assert "P, P, P -> P, P" in found
    assert "B, P, B -> B, B" not in found


def test_a_transposed_gradient_is_read_in_its_own_order() -> None:
    p, g, mean, square = real(4, 6), real(6, 4), real(4, 6), positive(4, 6)
    settings = {**_ADAM, "decoupled": True}

    turned = torch.ops.sbp.fused_adam.default(p, g.t(), mean, square, [], 2, 0.1, **settings)
    straight = torch.ops.sbp.fused_adam.default(
        p, g.t().contiguous(), mean, square, [], 2, 0.1, **settings
    )

    assert all(torch.equal(a, b) for a, b in zip(turned, straight, strict=True))


def test_arguments_stay_as_they_are() -> None:
    p, g, mean, square = real(4), real(4), real(4), positive(4)
    before = [value.clone() for value in (p, g, mean, square)]

    torch.ops.sbp.fused_adam.default(p, g, mean, square, [], 1, 0.1, decoupled=False, **_ADAM)

    for value, old in zip((p, g, mean, square), before, strict=True):
        assert torch.equal(value, old)


def test_a_rank_without_elements_has_nothing_to_do() -> None:
    none = real(0, 6)

    made = torch.ops.sbp.fused_sgd.default(none, none, [none], 0.1, nesterov=True, **_SGD)

    assert [tuple(value.shape) for value in made] == [(0, 6), (0, 6)]


def test_a_gradient_of_fewer_bits_is_widened() -> None:
    p, g = real(4).float(), real(4).bfloat16()

    narrow = torch.ops.sbp.fused_sgd.default(p, g, [], 0.1, nesterov=False, **_PLAIN)
    wide = torch.ops.sbp.fused_sgd.default(p, g.float(), [], 0.1, nesterov=False, **_PLAIN)

    assert torch.equal(narrow[0], wide[0])
    assert narrow[0].dtype is torch.float32
