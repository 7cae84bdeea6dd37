"""Distances between the rows of matrices, and the cross product.

A distance under a norm p is a sum over the columns for p = 0 and 1 and a maximum for p = infinity;
other norms take a root of the whole sum.
"""

from __future__ import annotations

from math import inf, prod

from sbp_core.signatures import (
    Dependence,
    Dim,
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    broadcast_dims,
    ignored,
    linear,
    unread,
    wrap_dim,
)

_ROOT = "a norm takes a root of the sum over the columns"
_PAIRS = "each row is paired with every other"


def _batched(call: OpCall, last: tuple[str, ...]) -> list[Dims]:
    """Return the dims of every tensor: broadcast batch dims, then a pair of letters each."""
    types = (*call.inputs, *call.outputs)
    wide = max((entry.shape[:-2] for entry in types), key=lambda shape: (len(shape), prod(shape)))
    made: list[Dims] = []
    for entry, letters in zip(types, last, strict=True):
        rest: list[Dim] = [(letter,) for letter in letters]
        made.append((*broadcast_dims(entry.shape[:-2], wide), *rest))
    return made


def _over_columns(norm: float) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Return which labels are whole, and how the columns `m` are reduced."""
    if norm in (0, 1):
        return frozenset(), ()
    return (frozenset(), (("m", "max"),)) if norm == inf else (frozenset("m"), ())


def _unread(norm: float, count: int) -> tuple[Dependence, ...]:
    """Return which of `count` arguments, the distances last, a gradient does not read.

    Under p = 1 it hangs on signs of differences, under p = 0 it is zero.
    """
    if norm not in (0.0, 1.0):
        return ()
    first = 0 if norm == 0.0 else count - 1
    return (*map(unread, range(first, count - 1)), ignored(count - 1))


def _cdist(call: OpCall) -> Notation:
    """`b p m, b r m => b p r`."""
    norm = 2.0 if call.op == "aten._euclidean_dist.default" else argument(call, 2, "p")
    left, right, made = _batched(call, ("pm", "rm", "pr"))
    whole, reductions = _over_columns(norm)
    return Notation(
        inputs=(left, right),
        outputs=(made,),
        whole=whole,
        reductions=reductions,
        work_flop=3.0 * prod(call.outputs[0].shape) * call.inputs[0].shape[-1],
        why=_ROOT if whole else "",
    )


def _cdist_backward(call: OpCall) -> Notation:
    """`b p r, b p m, b r m, b p r => b p m; linear 0`: a sum over the rows of argument 2."""
    gradient, left, right, distance, made = _batched(call, ("pr", "pm", "rm", "pr", "pm"))
    return Notation(
        inputs=(gradient, left, right, distance),
        outputs=(made,),
        dependences=(linear(0), *_unread(argument(call, 3, "p"), 4)),
        work_flop=4.0 * prod(call.outputs[0].shape) * call.inputs[2].shape[-2],
    )


def _pdist(call: OpCall) -> Notation:
    """`n! m => q!`."""
    whole, reductions = _over_columns(argument(call, 1, "p", 2.0))
    return Notation(
        inputs=((("n",), ("m",)),),
        outputs=((("q",),),),
        whole=whole | {"n", "q"},
        reductions=reductions,
        work_flop=3.0 * call.outputs[0].shape[0] * call.inputs[0].shape[1],
        why=f"{_PAIRS}, and {_ROOT}" if whole else _PAIRS,
    )


def _pdist_backward(call: OpCall) -> Notation:
    """`q!, n! m, q! => n! m; linear 0`."""
    return Notation(
        inputs=((("q",),), (("n",), ("m",)), (("q",),)),
        outputs=((("n",), ("m",)),),
        dependences=(linear(0), *_unread(argument(call, 2, "p"), 3)),
        whole=frozenset("nq"),
        work_flop=4.0 * call.inputs[0].shape[0] * call.inputs[1].shape[1],
        why=_PAIRS,
    )


def _cross(call: OpCall) -> Notation:
    """`b c!, b c! => b c!; linear 0; linear 1`."""
    shape = call.outputs[0].shape
    dim = wrap_dim(argument(call, 2, "dim", -1), len(shape))
    tensors = [broadcast_dims(entry.shape, shape) for entry in (*call.inputs, *call.outputs)]
    return Notation(
        inputs=tuple(tensors[:2]),
        outputs=tuple(tensors[2:]),
        dependences=(linear(0), linear(1)),
        whole=frozenset({f"d{dim}"}),
        work_flop=3.0 * prod(shape),
        why="the three components of a cross product mix",
    )


RULES = {
    "aten._cdist_backward.default": Rule(_cdist_backward),
    "aten._cdist_forward.default": Rule(_cdist),
    "aten._euclidean_dist.default": Rule(_cdist),
    "aten._pdist_backward.default": Rule(_pdist_backward),
    "aten._pdist_forward.default": Rule(_pdist),
    "aten.linalg_cross.default": Rule(_cross),
}
