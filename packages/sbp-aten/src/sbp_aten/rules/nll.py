"""Negative log-likelihood, forward and backward: samples and classes may be split.

    sum     n c s0, n s0, w! => (), (); linear 0 to 0; linear 2; reduce c@1 none
    mean    n! c s0!, n! s0!, w! => (), (); linear 0 to 0; reduce c@1 none
    back    (), n c s0, n s0, w!, () => n c s0; linear 0; linear 3; unread 1

A rank with some of the classes ignores targets elsewhere: its losses are partial sums. It has all
targets and class weights, hence the total weight, which is output 1. A mean divides by that, which
a rank with some of the samples does not know; the backward operators are told.
"""

from __future__ import annotations

from sbp_aten.rules.loss import MEAN, NONE, SUM
from sbp_core.graph import Argument, Ref, Symbol
from sbp_core.signatures import (
    Dims,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    decreasing,
    fresh_dims,
    labels,
    linear,
    run_as_is,
    tensor_position,
    unread,
)

#: The target that a rank ignores, whatever the call ignores.
_ELSEWHERE = -100

_WEIGHTS = "any target may need any class weight"
_MEAN = "a mean divides by the weight of all samples"


def _dims(call: OpCall, scores: int) -> tuple[Dims, Dims, list[Dims]]:
    """Return dims of the scores, of the targets, and of the class weights if they are given."""
    num_dims = len(call.inputs[scores].shape)
    weighted = tensor_position(call, 2 + scores, "weight") is not None
    weight: list[Dims] = [(("w",),)] if weighted else []
    if num_dims == 1:
        return (("c",),), fresh_dims(len(call.inputs[scores + 1].shape), "t"), weight
    places = tuple((name,) for name in labels("s", num_dims - 2))
    return (("n",), ("c",), *places), (("n",), *places), weight


def _is_batched(call: OpCall, scores: int) -> bool:
    return len(call.inputs[scores].shape) > 1


def _forward(call: OpCall) -> Notation:
    scores, targets, weight = _dims(call, 0)
    batched = _is_batched(call, 0)
    reduction = argument(call, 3, "reduction")
    each_loss = batched and reduction == NONE
    samples = [name for (name,) in targets]
    mean = batched and reduction == MEAN
    in_weight = linear(2, outputs=(0,)) if each_loss else linear(2)
    return Notation(
        inputs=(scores, targets, *weight),
        outputs=(targets if each_loss else (), ()),
        dependences=(
            linear(0, outputs=(0,)),
            *((in_weight,) if weight and reduction != MEAN else ()),
            *((decreasing(0, outputs=(0,)),) if each_loss and not weight else ()),
        ),
        whole=frozenset([*"w" * len(weight), *(samples if mean or not batched else ())]),
        reductions=(
            ("c@1", "none"),
            # The total weight of losses that are not reduced is zero.
            *((f"{name}@1", "none") for name in samples if each_loss),
        ),
        why=_MEAN if mean else _WEIGHTS,
    )


def _backward(call: OpCall) -> Notation:
    scores, targets, weight = _dims(call, 1)
    batched = _is_batched(call, 1)
    reduction = argument(call, 4, "reduction")
    each_loss = batched and reduction == NONE
    total = len(call.inputs) - 1
    return Notation(
        inputs=(targets if each_loss else (), scores, targets, *weight, ()),
        outputs=(scores,),
        dependences=(
            linear(0),
            *((linear(3),) if weight else ()),
            *((decreasing(0),) if reduction != MEAN and not weight else ()),
            unread(1),
            *(() if reduction == MEAN else (unread(total),)),
        ),
        whole=frozenset([*"w" * len(weight), *(() if batched else (name for (name,) in targets))]),
        why=_WEIGHTS,
    )


def _localize_forward(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Sum over the own classes; a mean divides by the weight of all targets."""
    bounds = _classes(call, shards, 0)
    if bounds is None:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    scores, target, weight, reduction, ignored = (
        argument(call, index, name) for index, name in enumerate(_ARGUMENTS)
    )
    here, weight_here = _here(builder, call, target, weight, ignored, bounds, 0)
    kind = SUM if reduction == MEAN else reduction
    loss, own_total = builder.several(2, call.op, scores, here, weight_here, kind, _ELSEWHERE)
    if reduction == NONE and _is_batched(call, 0):
        return builder.program(loss, own_total)
    total = _total_weight(builder, call, target, weight, ignored)
    if reduction == MEAN:
        loss = builder("aten.div.Tensor", loss, total)
    return builder.program(loss, total)


_ARGUMENTS = ("self", "target", "weight", "reduction", "ignore_index")


def _localize_backward(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    bounds = _classes(call, shards, 1)
    if bounds is None:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    gradient, scores, target, weight, reduction, ignored, total = (
        argument(call, index, name)
        for index, name in enumerate(("grad_output", *_ARGUMENTS, "total_weight"))
    )
    here, weight_here = _here(builder, call, target, weight, ignored, bounds, 1)
    args = (gradient, scores, here, weight_here, reduction, _ELSEWHERE, total)
    return builder.program(builder(call.op, *args))


def _classes(call: OpCall, shards: Shards, scores: int) -> tuple[int, int] | None:
    """Return the bounds of the classes that a rank holds; None if it holds all."""
    dim = int(_is_batched(call, scores))
    start, stop = shards.inputs[scores][dim]
    return None if stop - start == call.inputs[scores].shape[dim] else (start, stop)


def _here(
    builder: LocalProgramBuilder,
    call: OpCall,
    target: Argument,
    weight: Argument,
    ignored: int,
    bounds: tuple[int, int],
    scores: int,
) -> tuple[Ref, Argument]:
    """Return targets counted from the first class of the rank, and the weights of its classes."""
    start, stop = bounds
    wide = _widened(builder, call, target, scores)
    inside = builder(
        "aten.logical_and.default",
        builder("aten.ge.Scalar", wide, start),
        builder("aten.lt.Scalar", wide, stop),
    )
    if start <= ignored < stop:
        wanted = builder("aten.ne.Scalar", wide, ignored)
        inside = builder("aten.logical_and.default", inside, wanted)
    shifted = builder("aten.sub.Scalar", wide, start)
    here = builder("aten.where.ScalarOther", inside, shifted, _ELSEWHERE)
    if weight is None:
        return here, None
    return here, builder("aten.slice.Tensor", weight, 0, start, stop)


def _widened(builder: LocalProgramBuilder, call: OpCall, target: Argument, scores: int) -> Argument:
    """Return targets as int64: what uint8 holds has no room for `_ELSEWHERE`."""
    if call.inputs[scores + 1].dtype == "int64":
        return target
    return builder("aten._to_copy.default", target, dtype=Symbol("dtype", "int64"))


def _total_weight(
    builder: LocalProgramBuilder, call: OpCall, target: Argument, weight: Argument, ignored: int
) -> Ref:
    """Return the weight of all targets, whatever their class."""
    wide = _widened(builder, call, target, 0)
    wanted = builder("aten.ne.Scalar", wide, ignored)
    dtype = Symbol("dtype", call.outputs[1].dtype)
    if weight is None:
        return builder("aten.sum.default", wanted, dtype=dtype)
    safe = builder("aten.where.ScalarOther", wanted, wide, 0)
    weights = builder("aten.take.default", weight, safe)
    return builder("aten.sum.default", builder("aten.where.ScalarOther", wanted, weights, 0.0))


RULES = {
    "aten.nll_loss2d_backward.default": Rule(_backward, _localize_backward),
    "aten.nll_loss2d_forward.default": Rule(_forward, _localize_forward),
    "aten.nll_loss_backward.default": Rule(_backward, _localize_backward),
    "aten.nll_loss_forward.default": Rule(_forward, _localize_forward),
}
