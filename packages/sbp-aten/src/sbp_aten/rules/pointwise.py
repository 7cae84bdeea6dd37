"""Pointwise operators: the notation is broadcasting, computed from the shapes.

Which operators are pointwise is known from ATen's tags; here stand those that ATen does not tag. In
what they are linear or monotone is in `effects`.
"""

from __future__ import annotations

from sbp_aten.rules.effects import dependences
from sbp_core.signatures import Notation, OpCall, Rule, broadcasting


def notation_of(call: OpCall) -> Notation:
    """Return the notation of a pointwise call, with what ATen's operators are linear in."""
    return broadcasting(call, *dependences(call))


#: The rule of every operator that ATen tags as pointwise.
POINTWISE = Rule(notation_of)

#: What some ATen since 2.11 does not tag as pointwise although it is, with `default` as overload.
_UNTAGGED = (
    "_conj _conj_copy _conj_physical _masked_scale _neg_view _neg_view_copy _prelu_kernel "
    "_prelu_kernel_backward _to_copy complex copy elu_backward "
    "fake_quantize_per_tensor_affine_cachemask floor_divide hardshrink_backward "
    "hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu "
    "leaky_relu_backward mish_backward polar rrelu_with_noise_backward softplus_backward "
    "softshrink_backward zero"
)

RULES = dict.fromkeys(
    (
        *(f"aten.{name}.default" for name in _UNTAGGED.split()),
        "aten._add_relu.Scalar",
        "aten._add_relu.Tensor",
        "aten.fill.Scalar",
        "aten.fill.Tensor",
        "aten.floor_divide.Scalar",
        "aten.isin.Tensor_Scalar",
        "aten.masked_fill.Tensor",
        "aten.rsub.Tensor",
        "aten.where.Scalar",
        "aten.where.ScalarOther",
        "aten.where.ScalarSelf",
    ),
    POINTWISE,
)
