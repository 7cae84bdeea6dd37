"""Operators on lists and fused optimizers: verified by execution; places know nothing of others."""

from __future__ import annotations

from math import inf

import pytest
import torch

from sbp_aten.rules import foreach
from sbp_aten.rules.foreach import RULES
from sbp_core.signatures import derive, legal_signatures
from sbp_torch.signatures.verification import call_of, verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(17)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


def pair() -> list[torch.Tensor]:
    return [real(3, 2), real(5)]


def positives() -> list[torch.Tensor]:
    return [positive(3, 2), positive(5)]


def steps() -> list[torch.Tensor]:
    return [torch.tensor(3.0), torch.tensor(3.0)]


_UNARY = [op for op in RULES if op.endswith(".default") and "_foreach_" in op]
_BINARY = ("add", "clamp_max", "clamp_min", "div", "maximum", "minimum", "mul", "pow", "sub")
_NUMBERS = {"Scalar": 2.0, "ScalarList": [2.0, -0.5]}
_ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
_SGD = {"weight_decay": 0.1, "dampening": 0.2, "nesterov": False, "maximize": False}


def _adam(*, amsgrad: bool, **given: object) -> Sample:
    extra = positives() if amsgrad else []
    lists = (pair(), pair(), pair(), positives(), extra, steps())
    return sample(*lists, amsgrad=amsgrad, **_ADAM, **given)


def _binary(name: str) -> dict[str, list[Sample]]:
    made = {f"aten._foreach_{name}.List": [sample(pair(), positives())]}
    for overload, number in _NUMBERS.items():
        made[f"aten._foreach_{name}.{overload}"] = [sample(pair(), number)]
    return made


CASES: dict[str, list[Sample]] = {
    **{op: [sample(positives())] for op in _UNARY},
    **{
        op: case
        for name in _BINARY
        for op, case in _binary(name).items()
    },
    **{
        f"aten._foreach_{name}.{overload}": [sample(pair(), pair(), positives(), number)]
        for name in ("addcdiv", "addcmul")
        for overload, number in {**_NUMBERS, "Tensor": torch.tensor([0.5, 2.0])}.items()
    },
    **{
        f"aten._foreach_{name}.Tensor": [sample(pair(), positive())]
        for name in ("add", "div", "mul")
    },
    "aten._foreach_add.List": [sample(pair(), pair(), alpha=-2)],
    "aten._foreach_copy.default": [sample(pair(), pair())],
    "aten._foreach_lerp.List": [sample(pair(), pair(), pair())],
    "aten._foreach_lerp.Scalar": [sample(pair(), pair(), 0.3)],
    "aten._foreach_lerp.ScalarList": [sample(pair(), pair(), [0.3, 1.5])],
    "aten._foreach_max.default": [sample(pair())],
    "aten._foreach_mm.default": [sample([real(3, 2), real(2, 5)], [real(2, 4), real(5, 3)])],
    "aten._foreach_norm.Scalar": [sample(pair(), order) for order in (1, 2, inf)],
    "aten._foreach_pow.Scalar": [sample(positives(), power) for power in (2, 3, 1.5)],
    "aten._foreach_pow.ScalarAndTensor": [sample(2.0, pair())],
    "aten._foreach_powsum.Scalar": [sample(pair(), 2)],
    "aten._fused_adagrad.default": [
        sample(
            pair(), pair(), positives(), steps(),
            lr=0.1, lr_decay=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
        )
    ],
    "aten._fused_adagrad.tensor_lr": [
        sample(
            pair(), pair(), positives(), steps(), lr=torch.tensor(0.1),
            lr_decay=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
        )
    ],
    "aten._fused_adam.default": [
        _adam(amsgrad=False, lr=0.1),
        _adam(amsgrad=True, lr=0.1, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)),
    ],
    "aten._fused_adam.tensor_lr": [_adam(amsgrad=False, lr=torch.tensor(0.1))],
    "aten._fused_adamw.default": [_adam(amsgrad=False, lr=0.1)],
    "aten._fused_adamw.tensor_lr": [_adam(amsgrad=True, lr=torch.tensor(0.1))],
    "aten._fused_sgd.default": [
        sample(pair(), pair(), [], momentum=0.0, lr=0.1, is_first_step=False, **_SGD),
        sample(pair(), pair(), pair(), momentum=0.9, lr=0.1, is_first_step=True, **_SGD),
    ],
    "aten._fused_sgd.tensor_lr": [
        sample(
            pair(), pair(), pair(), momentum=0.9, lr=torch.tensor(0.1), is_first_step=False, **_SGD
        )
    ],
}  # fmt: skip


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in CASES[op]:
        report = verify(op, *args, axis_sizes=(2, 3), isolated=False, **kwargs)

        assert report.ok, str(report)


def test_every_rule_is_run_by_these_tests() -> None:
    assert {op for op in foreach.RULES if op.startswith("aten.")} == set(CASES)


def test_sums_pass_at_one_place_or_at_all() -> None:
    found = {str(entry) for entry in legal_signatures("aten._foreach_add.List", pair(), pair())}

    assert "P, B, P, B -> P, B" in found
    assert "P, P, P, P -> P, P" in found
    assert "P, B, B, B -> P, B" not in found
    assert "S(0), B, S(0), B -> S(0), B" in found


def test_an_addend_of_all_places_is_partial_for_all_of_them() -> None:
    found = {str(entry) for entry in legal_signatures("aten._foreach_add.Tensor", pair(), real())}

    assert "P, P, P -> P, P" in found
    assert "P, B, P -> P, B" not in found
    assert 'P("max"), B, B -> P("max"), B' in found


def test_a_sum_of_powers_is_a_sum_of_those_of_its_parts() -> None:
    found = {str(entry) for entry in legal_signatures("aten._foreach_powsum.Scalar", pair(), 2)}

    assert found == {"S(0), B -> P, B", "S(1), B -> P, B", "B, S(0) -> B, P", "B, B -> B, B"}


def test_a_step_of_sgd_is_linear_in_values_gradients_and_momenta_together() -> None:
    args, kwargs = CASES["aten._fused_sgd.default"][1]

    found = {str(entry) for entry in derive(call_of("aten._fused_sgd.default", args, kwargs)[0], 2)}

    assert "P, B, P, B, P, B -> P, B, P, B, P, B" in found
    assert "S(0), B, S(0), B, S(0), B -> S(0), B, S(0), B, S(0), B" in found


def test_a_step_of_adam_is_elementwise_and_counts_whole_steps() -> None:
    args, kwargs = CASES["aten._fused_adam.default"][0]

    found = derive(call_of("aten._fused_adam.default", args, kwargs)[0], 2)

    assert [str(entry) for entry in found if "S(1)" in str(entry)] == [
        "S(1), B, S(1), B, S(1), B, S(1), B, B, B -> S(1), B, S(1), B, S(1), B, S(1), B"
    ]
