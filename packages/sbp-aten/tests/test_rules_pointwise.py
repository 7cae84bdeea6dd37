"""Pointwise operators, verified by execution, and the exact signatures of those that matter."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from sbp_aten.rules import pointwise
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.signatures import OpCall, RuleRegistry, derive, legal_signatures
from sbp_torch.signatures.verification import verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(11)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


def unit(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_draw) * 0.8 + 0.1


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(-high, high + 1, shape, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return whole(1, *shape) > 0


def byte(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=_draw).to(torch.uint8)


def imaginary(*shape: int) -> torch.Tensor:
    return torch.complex(real(*shape), real(*shape))


#: Of one tensor of any real dtype, bools included.
UNARY = (
    "angle asinh atan clone erf erfc exp exp2 expm1 isinf isnan isneginf isposinf logical_not "
    "nan_to_num rsqrt sgn sigmoid sign signbit sinh sqrt log1p special_erfcx special_i1 "
    "special_log_ndtr special_modified_bessel_i1 tanh zero"
)

#: Of one tensor of any real dtype but bool.
NUMERIC = "ceil floor positive relu round trunc"

#: Of one real tensor.
REAL_UNARY = (
    "celu deg2rad elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish rad2deg silu "
    "softplus softshrink"
)

#: Of two tensors that broadcast, real or not.
BINARY = (
    "add.Tensor atan2.default clamp_max.Tensor clamp_min.Tensor copysign.Tensor eq.Tensor "
    "floor_divide.default fmax.default fmin.default ge.Tensor gt.Tensor heaviside.default "
    "le.Tensor logical_and.default logical_or.default lt.Tensor max.other maximum.default "
    "min.other minimum.default mul.Tensor ne.Tensor"
)

#: Gradient, data.
GRADIENTS = (
    "hardswish_backward hardsigmoid_backward logit_backward mish_backward sigmoid_backward "
    "silu_backward tanh_backward"
)

CASES: dict[str, list[Sample]] = {
    **{
        f"aten.{name}.default": [
            *([sample(truth(5))] if name in UNARY.split() else []),
            sample(real(4, 5)),
            sample(whole(9, 4, 5)),
            sample(real()),
        ]
        for name in (*UNARY.split(), *NUMERIC.split())
    },
    **{f"aten.{name}.default": [sample(real(4, 5))] for name in REAL_UNARY.split()},
    **{
        f"aten.{name}": [
            sample(real(4, 5), positive(5)),
            sample(whole(9, 4, 1), whole(4, 4, 5).abs() + 1),
            sample(real(3), positive()),
        ]
        for name in BINARY.split()
    },
    **{f"aten.{name}.default": [sample(real(4, 5), unit(4, 5))] for name in GRADIENTS.split()},
    "aten.__lshift__.Scalar": [sample(whole(9, 4, 5), 2)],
    "aten.__rshift__.Scalar": [sample(whole(9, 4, 5), 2)],
    "aten._add_relu.Scalar": [sample(real(4, 5), 0.5)],
    "aten._add_relu.Tensor": [sample(real(4, 5), real(5))],
    "aten._conj.default": [sample(imaginary(4, 5))],
    "aten._conj_copy.default": [sample(imaginary(4, 5))],
    "aten._conj_physical.default": [sample(imaginary(4, 5)), sample(real(3))],
    "aten._neg_view.default": [sample(real(4, 5))],
    "aten._neg_view_copy.default": [sample(real(4, 5))],
    "aten._prelu_kernel.default": [sample(real(4, 5, 3), real(1, 5, 1)), sample(real(4), real(1))],
    "aten._prelu_kernel_backward.default": [sample(real(4, 5), real(4, 5), real(1, 5))],
    "aten._to_copy.default": [
        sample(given, dtype=dtype)
        for given in (
            real(4, 5) * 9,
            whole(9, 4, 5),
            truth(4, 5),
            byte(5),
            whole(9, 5).to(torch.int8),
        )
        for dtype in (torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
    ],
    "aten.acosh.default": [sample(positive(4, 5) + 1)],
    "aten.add.Scalar": [sample(real(4, 5), 2.0), sample(real(4, 5), 0)],
    "aten.add.Tensor": [
        sample(real(4, 1, 5), real(3, 5), alpha=2),
        sample(real(4, 5), real(5), alpha=-2),
        sample(real(4, 5), 0),
        sample(truth(4, 5), truth(5)),
        sample(byte(4, 5), byte(5)),
    ],
    "aten.addcdiv.default": [sample(real(4, 5), real(4, 5), positive(5), value=0.1)],
    "aten.addcmul.default": [sample(real(4, 5), real(4, 5), real(4, 1), value=0.1)],
    "aten.bitwise_and.Tensor": [sample(truth(4, 5), truth(5)), sample(whole(9, 4, 5), whole(9, 5))],
    "aten.bitwise_left_shift.Tensor": [sample(whole(9, 4, 5), whole(3, 5).abs())],
    "aten.bitwise_not.default": [sample(truth(4, 5)), sample(whole(9, 4)), sample(byte(5))],
    "aten.bitwise_or.Tensor": [sample(truth(4, 5), truth(5)), sample(whole(9, 4, 5), whole(9, 5))],
    "aten.bitwise_right_shift.Tensor": [sample(whole(99, 4, 5), whole(3, 5).abs())],
    "aten.clamp.Tensor": [
        sample(real(4, 5), -positive(5), positive(4, 1)),
        sample(real(4, 5), None, real(5)),
        sample(real(4, 5), real(5)),
    ],
    "aten.clamp.default": [sample(real(4, 5), -0.5, 0.5), sample(real(4, 5), None, 0.5)],
    "aten.complex.default": [sample(real(4, 5), real(5))],
    "aten.copy.default": [sample(real(4, 5), real(5))],
    "aten.div.Scalar": [sample(real(4, 5), 3.0), sample(real(4, 5), -3.0)],
    "aten.div.Scalar_mode": [sample(whole(9, 4, 5), -3, rounding_mode="floor")],
    "aten.div.Tensor": [
        sample(real(4, 5), positive(4, 1)),
        sample(whole(9, 4), whole(3, 4).abs() + 1),
    ],
    "aten.elu.default": [sample(real(4, 5), 0.7, 1.1, 1.2), sample(real(4, 5), -1.0)],
    "aten.elu_backward.default": [
        sample(real(4, 5), 0.7, 1.1, 1.2, False, real(4, 5)),
        sample(real(4, 5), 0.7, 1.1, 1.2, True, real(4, 5)),
    ],
    "aten.fake_quantize_per_tensor_affine_cachemask.default": [
        sample(real(4, 5).float(), 0.1, 0, -8, 8)
    ],
    "aten.fill.Scalar": [sample(real(4, 5), 2.0), sample(real(4, 5), 0)],
    "aten.fill.Tensor": [sample(real(4, 5), real())],
    "aten.floor_divide.Scalar": [sample(whole(9, 4, 5), 2), sample(whole(9, 4, 5), -2)],
    "aten.frexp.Tensor": [sample(real(4, 5))],
    "aten.gelu_backward.default": [sample(real(4, 5), real(4, 5), approximate="tanh")],
    "aten.hardshrink_backward.default": [sample(real(4, 5), real(4, 5), 0.5)],
    "aten.hardtanh_backward.default": [sample(real(4, 5), real(4, 5), -0.5, 0.5)],
    "aten.igamma.default": [sample(positive(4, 5), positive(5))],
    "aten.isin.Tensor_Scalar": [sample(whole(9, 4, 5), 3)],
    "aten.ldexp.Tensor": [sample(real(4, 5), whole(3, 5))],
    "aten.leaky_relu.default": [sample(real(4, 5), 0.2), sample(real(4, 5), -0.2)],
    "aten.leaky_relu_backward.default": [
        sample(real(4, 5), real(4, 5), 0.2, False),
        sample(real(4, 5), real(4, 5), -0.2, False),
    ],
    "aten.lerp.Scalar": [sample(real(4, 5), real(4, 5), weight) for weight in (0.1, 1.5, -0.5)],
    "aten.lerp.Tensor": [sample(real(4, 5), real(4, 5), real(5))],
    "aten.logaddexp.default": [sample(real(4, 5), real(5))],
    "aten.logit.default": [sample(unit(4, 5)), sample(real(4, 5), 0.1)],
    "aten.masked_fill.Scalar": [sample(real(4, 5), truth(5), value) for value in (0.0, -9.0)],
    "aten.masked_fill.Tensor": [sample(real(4, 5), truth(5), real())],
    "aten.mul.Scalar": [sample(real(4, 5), value) for value in (-3.0, 0.0, 3.0)],
    "aten.mul.Tensor": [
        sample(real(4, 5), real(5)),
        sample(real(4, 5), truth(4, 5)),
        sample(truth(4, 5), truth(4, 1)),
        sample(byte(4, 5), byte(5)),
        sample(real(4, 5), -2.0),
    ],
    "aten.native_dropout_backward.default": [sample(real(4, 5), truth(4, 5), 2.0)],
    "aten.neg.default": [sample(real(4, 5)), sample(whole(9, 5)), sample(byte(4, 5))],
    "aten.nextafter.default": [sample(real(4, 5), real(5))],
    "aten.polar.default": [sample(real(4, 5), real(5))],
    "aten.pow.Scalar": [sample(base, real(4, 5)) for base in (2.0, 0.5)],
    "aten.pow.Tensor_Scalar": [
        *(sample(real(4, 5), power) for power in (1, 2, 3, -1)),
        sample(positive(4, 5), 1.5),
        sample(positive(4, 5), -0.5),
    ],
    "aten.round.decimals": [sample(real(4, 5), decimals=1)],
    "aten.rrelu_with_noise_backward.default": [
        sample(real(4, 5), real(4, 5), real(4, 5), 0.1, 0.3, True, False),
        sample(real(4, 5), real(4, 5), real(4, 5), 0.1, 0.3, False, False),
    ],
    "aten.rsub.Scalar": [sample(real(4, 5), 1.0)],
    "aten.rsub.Tensor": [sample(real(4, 5), real(5), alpha=2)],
    "aten.softplus.default": [sample(real(4, 5)), sample(real(4, 5), 2.0, 1.0)],
    "aten.softplus_backward.default": [sample(real(4, 5), real(4, 5), 1.0, 20.0)],
    "aten.softshrink_backward.default": [sample(real(4, 5), real(4, 5), 0.5)],
    "aten.sub.Scalar": [sample(real(4, 5), 2.0)],
    "aten.sub.Tensor": [sample(real(4, 5), real(5)), sample(real(4, 5), real(5), alpha=-2)],
    "aten.threshold.default": [sample(real(4, 5), 0.1, value) for value in (0.1, 5.0, -5.0)],
    "aten.threshold_backward.default": [sample(real(4, 5), real(4, 5), 0)],
    "aten.where.Scalar": [sample(truth(4, 5), 1.0, 2.0), sample(truth(4, 5), 2.0, 1.0)],
    "aten.where.ScalarOther": [sample(truth(4, 5), real(5), value) for value in (0, 2.0)],
    "aten.where.ScalarSelf": [sample(truth(4, 5), 0.0, real(4, 5))],
    "aten.where.self": [sample(truth(4, 1), real(4, 5), real(5))],
}
#: One `_masked_scale` is for CUDA only.
NOT_ON_A_CPU = {"aten._masked_scale.default"}

_z = torch.exp(-real(4, 5).abs())
ELEMENTWISE: dict[str, list[Sample]] = {
    "aten.bucketize.Scalar": [sample(0.3, real(7).sort()[0])],
    "aten.bucketize.Tensor": [
        sample(real(4, 5), real(7).sort()[0]),
        sample(real(5), real(2).sort()[0], out_int32=True, right=True),
    ],
    "aten.glu.default": [sample(real(4, 6)), sample(real(4, 6), 0)],
    "aten.glu_backward.default": [sample(real(4, 3), real(4, 6), -1)],
    "aten.glu_jvp.default": [sample(real(4, 3), real(4, 6), real(4, 6), 1)],
    "aten.isin.Scalar_Tensor": [sample(3, whole(4, 7)), sample(3, whole(4, 7), invert=True)],
    "aten.isin.Tensor_Tensor": [
        sample(whole(9, 4, 5), whole(9, 7)),
        sample(whole(9, 4, 5), whole(9, 2, 3), invert=True),
    ],
    "aten.log_sigmoid_backward.default": [
        sample(real(4, 5), real(4, 5), _z),
        sample(real(4, 5).float(), real(4, 5).float(), _z.float()),
    ],
    "aten.log_sigmoid_forward.default": [sample(real(4, 5))],
    "aten.rrelu_with_noise.default": [sample(real(4, 5), real(4, 5), 0.1, 0.3, False)],
    "aten.rrelu_with_noise_functional.default": [
        sample(real(4, 5), real(4, 5), 0.1, 0.3, False),
        sample(real(4, 5), real(4, 5), 0.1, 0.3, True),
    ],
    "aten.searchsorted.Scalar": [sample(real(7).sort()[0], 0.3)],
    "aten.searchsorted.Tensor": [
        sample(real(4, 7).sort()[0], real(4, 5), right=True),
        sample(real(7).sort()[0], real(4, 5), side="left"),
        sample(torch.tensor([2.0, 0.0, 1.0]), real(4).float(), sorter=torch.tensor([1, 2, 0])),
    ],
    "aten.view_as_complex.default": [sample(real(4, 5, 2))],
    "aten.view_as_complex_copy.default": [sample(real(2, 2))],
    "aten.view_as_real.default": [sample(imaginary(4, 5))],
    "aten.view_as_real_copy.default": [sample(imaginary(4, 5))],
}


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("op", [*CASES, *ELEMENTWISE])
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in chain(CASES.get(op, ()), ELEMENTWISE.get(op, ())):
        report = verify(op, *args, axis_sizes=(2, 3), isolated=False, **kwargs)

        assert report.ok, str(report)


def test_every_rule_is_run_by_these_tests() -> None:
    assert set(pointwise.RULES) <= {*CASES, *NOT_ON_A_CPU, *ELEMENTWISE}


def partials(op: str, *args: object, **kwargs: object) -> set[str]:
    """Return the signatures with partial inputs."""
    found = map(str, legal_signatures(op, *args, **kwargs))
    return {text for text in found if "P" in text.split("->")[0]}


def test_addition_passes_sums_jointly_and_extremes_beside_a_whole_addend() -> None:
    found = partials("aten.add.Tensor", (4, 5), (5,))

    assert found == {
        "P, P -> P",
        'P("max"), B -> P("max")',
        'P("min"), B -> P("min")',
        'B, P("max") -> P("max")',
        'B, P("min") -> P("min")',
    }


def test_a_negative_alpha_swaps_maximum_and_minimum() -> None:
    assert 'B, P("max") -> P("min")' in partials("aten.add.Tensor", (4,), (4,), alpha=-1)
    assert 'B, P("max") -> P("max")' in partials("aten.sub.Tensor", (4,), (4,), alpha=-1)


@pytest.mark.parametrize(("factor", "becomes"), [(2.0, "max"), (-2.0, "min")])
def test_a_factor_of_known_sign_passes_extremes(factor: float, becomes: str) -> None:
    assert partials("aten.mul.Scalar", (4, 5), factor) >= {"P -> P", f'P("max") -> P("{becomes}")'}


def test_a_number_that_makes_infinities_passes_no_sums() -> None:
    assert "P -> P" not in partials("aten.mul.Scalar", (4,), float("inf"))
    assert "P -> P" not in partials("aten.div.Scalar", (4,), 0)
    assert "P -> P" in partials("aten.div.Scalar", (4,), float("inf"))


def test_a_factor_that_only_the_host_knows_passes_no_extremes() -> None:
    data = TensorType((4,), "float32")
    call = OpCall(
        op="aten.mul.Tensor",
        args=(Ref("x"), Ref("rate")),
        inputs=(data,),
        tensor_names=("x",),
        outputs=(data,),
        tags=("pointwise",),
    )

    assert [str(found) for found in derive(call, 2, rules=RuleRegistry())] == [
        "S(0) -> S(0)",
        "P -> P",
        "B -> B",
    ]


def test_a_factor_without_dims_is_a_tensor_of_unknown_sign() -> None:
    assert partials("aten.mul.Tensor", (4,), ()) == {"P, B -> P", "B, P -> P"}


def test_adding_a_number_is_affine_unless_it_is_zero() -> None:
    assert "P -> P" not in partials("aten.add.Tensor", (4,), 1.0)
    assert "P -> P" in partials("aten.add.Tensor", (4,), 0)


def test_the_maximum_of_bools_is_or_and_their_minimum_is_and() -> None:
    data = TensorType((4,), "bool")

    assert 'P("max"), P("max") -> P("max")' in partials("aten.logical_or.default", data, data)
    assert 'P("min"), P("min") -> P("min")' in partials("aten.logical_and.default", data, data)
    assert partials("aten.logical_or.default", (4,), (4,)) == set()


def test_comparisons_are_monotone() -> None:
    assert partials("aten.gt.Tensor", (4,), (4,)) == {
        'P("max"), B -> P("max")',
        'P("min"), B -> P("min")',
        'B, P("max") -> P("min")',
        'B, P("min") -> P("max")',
    }


def test_only_a_minimum_passes_where_an_operator_is_not_defined_below_zero() -> None:
    assert partials("aten.sqrt.default", (4,)) == {'P("min") -> P("min")'}


def test_numbers_of_few_bits_are_not_said_to_keep_their_order() -> None:
    assert partials("aten.neg.default", TensorType((4,), "uint8")) == {"P -> P"}


@pytest.mark.parametrize(
    ("before", "after", "passes"),
    [
        ("float32", "float16", {"P", "max"}),
        ("float32", "int64", {"max"}),
        ("float32", "bool", set()),
        ("int64", "int32", {"P"}),
        ("int32", "int64", {"max"}),
        ("bool", "float32", {"max"}),
        ("uint8", "int8", set()),
        ("uint8", "int16", {"max"}),
    ],
)
def test_a_conversion_passes_what_its_dtypes_allow(
    before: str, after: str, passes: set[str]
) -> None:
    given = TensorType((4,), before)

    found = partials("aten._to_copy.default", given, dtype=getattr(torch, after))

    assert ("P -> P" in found) == ("P" in passes)
    assert ('P("max") -> P("max")' in found) == ("max" in passes)


def test_a_lookup_among_split_boundaries_counts_in_parts() -> None:
    found = {str(entry) for entry in legal_signatures("aten.bucketize.Tensor", (4, 5), (7,))}

    assert "B, S(0) -> P" in found


def test_membership_in_split_tests_is_an_or() -> None:
    found = {str(entry) for entry in legal_signatures("aten.isin.Tensor_Tensor", (4,), (7,))}

    assert 'B, S(0) -> P("max")' in found


def test_bounds_that_are_partial_pass_through_a_clamp() -> None:
    found = partials("aten.clamp.Tensor", (4,), (4,), (4,))

    assert 'P("max"), P("max"), B -> P("max")' in found
    assert 'B, P("min"), P("min") -> P("min")' in found
    assert 'B, P("max"), P("max") -> P("max")' not in found
