"""Pointwise operators: the notation is broadcasting, computed from the shapes.

Which operators are pointwise is known from ATen's tags; here stand those that ATen does not tag. In
what they are linear or monotone is in `effects`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.signatures.arguments import labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dims, Notation
from sbp_core.signatures.rule import Rule
from sbp_aten.rules.effects import dependences

#: Why an operator that draws random numbers stays whole.
OTHER_NUMBERS = "a shard would draw other random numbers; those of sbp.random_* may be split"


def broadcast_dims(shape: Sequence[int], target: Sequence[int]) -> Dims:
    """Return the dims of a tensor that is broadcast to `target`, whose labels are d0, d1, ..."""
    names = list(labels("d", len(target)))[len(target) - len(shape) :]
    extents = target[len(target) - len(shape) :]
    return tuple(
        () if extent == 1 and wide != 1 else (name,)
        for name, extent, wide in zip(names, shape, extents, strict=True)
    )


def broadcasting(call: OpCall) -> Notation:
    """Return the notation of a pointwise call: `d0 d1, d1 => d0 d1`.

    One that draws random numbers stays whole.
    """
    target = call.outputs[0].shape
    random = "seeded" in call.tags
    return Notation(
        inputs=tuple(broadcast_dims(entry.shape, target) for entry in call.inputs),
        outputs=tuple(broadcast_dims(entry.shape, target) for entry in call.outputs),
        dependences=() if random else dependences(call),
        whole=frozenset(labels("d", len(target))) if random else frozenset(),
        why=OTHER_NUMBERS if random else "",
    )


#: The rule of every operator that ATen tags as pointwise.
POINTWISE = Rule(broadcasting)

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
