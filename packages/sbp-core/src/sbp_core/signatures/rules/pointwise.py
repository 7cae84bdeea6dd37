"""Pointwise operators: the notation is broadcasting, computed from the shapes.

Which operators are pointwise is known from ATen's tags; here stand only those that ATen does not
tag, and in what pointwise operators are linear or monotone.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.signatures.arguments import argument, labels, tensor_position
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import (
    Dependence,
    Dims,
    Notation,
    decreasing,
    increasing,
    linear,
    unread,
)
from sbp_core.signatures.rule import Rule

#: Sets of argument positions in which an operator is jointly linear. A set counts only where all
#: its arguments are tensors: `add(x, 1.0)` is affine.
_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten._to_copy.default": ((0,),),
    "aten.add.Tensor": ((0, 1),),
    "aten.addcdiv.default": ((0, 1),),
    "aten.addcmul.default": ((0, 1), (0, 2)),
    "aten.clone.default": ((0,),),
    "aten.copy.default": ((1,),),
    "aten.div.Scalar": ((0,),),
    "aten.div.Tensor": ((0,),),
    "aten.gelu_backward.default": ((0,),),
    "aten.lerp.Scalar": ((0, 1),),
    "aten.lerp.Tensor": ((0, 1),),
    "aten.mul.Scalar": ((0,),),
    "aten.mul.Tensor": ((0,), (1,)),
    "aten.neg.default": ((0,),),
    "aten.rsub.Tensor": ((0, 1),),
    "aten.sigmoid_backward.default": ((0,),),
    "aten.silu_backward.default": ((0,),),
    "aten.sub.Tensor": ((0, 1),),
    "aten.tanh_backward.default": ((0,),),
    "aten.threshold_backward.default": ((0,),),
    "aten.where.self": ((1, 2),),
    "sbp.accumulate": ((0,),),
}

#: Operators that are linear in argument 0 where the scalar in argument 1 or 2 is zero.
_LINEAR_BESIDE_ZERO = {
    "aten.masked_fill.Scalar": (0, 2, "value"),
    "aten.where.ScalarOther": (1, 2, "other"),
    "aten.where.ScalarSelf": (2, 1, "self"),
}

_INCREASING = frozenset(
    f"aten.{name}.default" for name in ("_to_copy", "clone", "exp", "relu", "sigmoid", "tanh")
)

#: Arguments of which only the shape matters.
_UNREAD = {"aten.copy.default": 0, "aten.fill.Scalar": 0}


def dependences(call: OpCall) -> tuple[Dependence, ...]:
    """Return in what a pointwise call is linear or monotone."""
    found: list[Dependence] = []
    for arguments in _LINEAR.get(call.op, ()):
        positions = [tensor_position(call, index, "") for index in arguments]
        present = tuple(position for position in positions if position is not None)
        if len(present) == len(positions):
            found.append(linear(*present))
    if call.op in _LINEAR_BESIDE_ZERO:
        tensor, scalar, name = _LINEAR_BESIDE_ZERO[call.op]
        position = tensor_position(call, tensor, "")
        if position is not None and argument(call, scalar, name) == 0:
            found.append(linear(position))
    if call.op in _INCREASING:
        found.append(increasing(0))
    if call.op == "aten.neg.default":
        found.append(decreasing(0))
    if call.op in _UNREAD:
        found.append(unread(_UNREAD[call.op]))
    return tuple(found)


def broadcast_dims(shape: Sequence[int], target: Sequence[int]) -> Dims:
    """Return the dims of a tensor that is broadcast to `target`, whose labels are d0, d1, ..."""
    names = list(labels("d", len(target)))[len(target) - len(shape) :]
    extents = target[len(target) - len(shape) :]
    return tuple(
        () if extent == 1 and wide != 1 else (name,)
        for name, extent, wide in zip(names, shape, extents, strict=True)
    )


def broadcasting(call: OpCall) -> Notation:
    """Return the notation of a pointwise call.

    One that draws random numbers stays whole: a shard would draw others.
    """
    target = call.outputs[0].shape
    random = "seeded" in call.tags
    return Notation(
        inputs=tuple(broadcast_dims(entry.shape, target) for entry in call.inputs),
        outputs=tuple(broadcast_dims(entry.shape, target) for entry in call.outputs),
        dependences=dependences(call),
        whole=frozenset(labels("d", len(target))) if random else frozenset(),
    )


#: The rule of every operator that ATen tags as pointwise.
POINTWISE = Rule(broadcasting)

RULES = dict.fromkeys(
    (
        "aten._to_copy.default",
        "aten.copy.default",
        "aten.fill.Scalar",
        "aten.where.ScalarOther",
        "aten.where.ScalarSelf",
    ),
    POINTWISE,
)
