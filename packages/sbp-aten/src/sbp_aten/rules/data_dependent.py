"""Operators whose extents, or the places they read, hang on the data: masks, runs and segments.

They are linear and increasing in what they pick from, and need the dims whole that they count.
"""

from __future__ import annotations

from sbp_aten.rules.updates import choosing
from sbp_core.signatures import (
    Dependence,
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    fresh_dims,
    increasing,
    linear,
    maxima,
    minima,
    opaque,
    unread,
)

_COUNTED = "where an element goes hangs on how many are picked before it"


def _picked(*inputs: int) -> Rule:
    """Return the rule of an operator that picks from arguments in the order of their elements."""

    def meaning(call: OpCall) -> Notation:
        types = (*call.inputs, *call.outputs)
        dims = [fresh_dims(len(entry.shape), f"t{index}_") for index, entry in enumerate(types)]
        return Notation(
            inputs=tuple(dims[: len(call.inputs)]),
            outputs=tuple(dims[len(call.inputs) :]),
            dependences=choosing(*inputs, zero=True),
            whole=frozenset(name for tensor in dims for (name,) in tensor),
            why=_COUNTED,
        )

    return Rule(meaning)


def _segment_dims(call: OpCall, count: int) -> tuple[Dims, Dims, Dims]:
    """Return dims of the data, of what segments make, and of lengths or offsets.

    Data are `b0 n! d0`, segments `b0 s! d0`, lengths `b0 s!` (offsets `b0 o!`): dims before the
    axis are a batch, dims behind it come along.

    Args:
        call: The call; the last tensor argument holds the lengths or offsets.
        count: Number of dims of the data.
    """
    batch = fresh_dims(len(call.inputs[-1].shape) - 1, "b")
    inner = fresh_dims(count - len(batch) - 1)
    lengths = argument(call, len(call.args), "lengths") is not None
    ends: Dims = (*batch, ("s" if lengths else "o",))
    return (*batch, ("n",), *inner), (*batch, ("s",), *inner), ends


_SEGMENTS = "which elements a segment has hangs on the lengths of those before it"


def _segment_reduce(call: OpCall) -> Notation:
    """Return `b0 n! d0, b0 s! => b0 s! d0`: data, lengths."""
    data, made, ends = _segment_dims(call, len(call.inputs[0].shape))
    kind, initial = argument(call, 1, "reduce"), call.kwargs.get("initial")
    dependences: tuple[Dependence, ...] = ()
    if kind in ("max", "min"):
        dependences = ((maxima if kind == "max" else minima)(0),)
    elif kind in ("sum", "mean") and not initial:
        dependences = (linear(0),)
    return Notation(
        inputs=(data, ends),
        outputs=(made,),
        dependences=dependences,
        whole=frozenset("nso"),
        why=_SEGMENTS,
    )


def _segment_reduce_backward(call: OpCall) -> Notation:
    """Return `b0 s! d0, b0 s! d0, b0 n! d0, b0 s! => b0 n! d0`: gradient, output, data, lengths."""
    data, made, ends = _segment_dims(call, len(call.inputs[2].shape))
    blind = argument(call, 3, "reduce") in ("sum", "mean")
    return Notation(
        inputs=(made, made, data, ends),
        outputs=(data,),
        dependences=(linear(0), *((increasing(0), unread(1), unread(2)) if blind else ())),
        whole=frozenset("nso"),
        why=_SEGMENTS,
    )


RULES = {
    "aten._segment_reduce_backward.default": Rule(_segment_reduce_backward),
    "aten.masked_scatter.default": _picked(0, 2),
    "aten.masked_scatter_backward.default": _picked(0),
    "aten.masked_select.default": _picked(0),
    "aten.nonzero.default": opaque("the data say how many elements there are"),
    "aten.nonzero_static.default": opaque(_COUNTED),
    "aten.repeat_interleave.Tensor": opaque("the data say how many elements there are"),
    "aten.segment_reduce.default": Rule(_segment_reduce),
}
