"""Sharding rules of writing into a view of a tensor, and of operators whose places depend on data.

    v d1, s d1 => v d1           slice_scatter(x, source, 0, start, end, step)

Each element of the result of `select_scatter`, `slice_scatter` and `diagonal_scatter` is an element
of the tensor or of the source: linear and increasing in both. A rank that holds a window (range) of
the dim that is written writes the part of the source that falls into it.

Masks, runs and segments are linear and increasing in the tensors that they pick from, and need the
dims whole that they count.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp_aten.rules.formula import by_operator, notation, stated
from sbp_aten.rules.scatter import choosing
from sbp_aten.rules.windows import given, is_cut, length
from sbp_core.graph import Ref
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    labels,
    opaque,
    run_as_is,
    wrap_dim,
)

_SHORTER = "why the source is shorter than the tensor there"
_CHOSEN = "linear 0 1; increasing 0; increasing 1; increasing 0 1"


def _written(call: OpCall, source: Sequence[str], more: str = "") -> Notation:
    """Return the notation, given the dims of the source; its separate dims (`s0!`) are whole."""
    target = " ".join(f"d{dim}" for dim in range(len(call.inputs[0].shape)))
    return notation(call, f"{target}, {' '.join(source)} => {target}; {_CHOSEN}{more}; {_SHORTER}")


def _as_it_is(target: Ref) -> LocalProgram:
    """Return the program of a rank into whose shard nothing is written."""
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.clone.default", target))


def _select(call: OpCall) -> Notation:
    """Return `d0 d1, d1 => d0 d1` for dim 0: the source is one row."""
    names = list(labels("d", len(call.inputs[0].shape)))
    del names[wrap_dim(argument(call, 2, "dim"), len(names))]
    return _written(call, names)


def _select_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Write the row if it is in the window."""
    (target, source, dim, index), _ = given(call, ("self", "src", "dim", "index"))
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    at = wrap_dim(dim, len(shape))
    if not is_cut(bounds[at], shape[at]):
        return run_as_is(call)
    place = index % shape[at] - bounds[at][0]
    if not 0 <= place < length(bounds[at]):
        return _as_it_is(target)
    return LocalCall(op=call.op, args=(target, source, at, place))


def _slice_bounds(call: OpCall) -> tuple[int, int, int]:
    """Return dim, first place and step of a slice."""
    shape = call.inputs[0].shape
    at = wrap_dim(argument(call, 2, "dim", 0), len(shape))
    start, step = argument(call, 3, "start"), argument(call, 5, "step", 1)
    first, _, _ = slice(start, None, step).indices(shape[at])
    return at, first, step


def _slice(call: OpCall) -> Notation:
    """Return `d0 d1, s0! d1 => d0 d1` for dim 0; the source may also be all of the result."""
    names = list(labels("d", len(call.inputs[0].shape)))
    if call.inputs[1].shape == call.inputs[0].shape:
        return _written(call, names, "; linear 1; unread 0")
    at, _, _ = _slice_bounds(call)
    names[at] = f"s{at}!"
    return _written(call, names)


def _slice_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Write the part of the source that falls into the window."""
    target, source = argument(call, 0, "self"), argument(call, 1, "src")
    at, first, step = _slice_bounds(call)
    shape, count = call.inputs[0].shape, call.inputs[1].shape[at]
    window = shards.inputs[0][at]
    if not is_cut(window, shape[at]):
        return run_as_is(call)
    if count == shape[at]:
        return LocalCall(op=call.op, args=(target, source, at, 0, length(window), 1))
    begin, end = (min(max(-(-(edge - first) // step), 0), count) for edge in window)
    if begin >= end:
        return _as_it_is(target)
    builder = LocalProgramBuilder()
    part = builder("aten.slice.Tensor", source, at, begin, end)
    start = first + begin * step - window[0]
    stop = start + (end - begin - 1) * step + 1
    return builder.program(builder(call.op, target, part, at, start, stop, step))


def _diagonal_dims(call: OpCall) -> tuple[int, int, int]:
    """Return offset and dims of a diagonal."""
    count = len(call.inputs[0].shape)
    row = wrap_dim(argument(call, 3, "dim1", 0), count)
    return argument(call, 2, "offset", 0), row, wrap_dim(argument(call, 4, "dim2", 1), count)


def _diagonal(call: OpCall) -> Notation:
    """Return `d0 d1 d2, d0 s => d0 d1 d2` for dims 1 and 2."""
    _, *both = _diagonal_dims(call)
    free = (dim for dim in range(len(call.inputs[0].shape)) if dim not in both)
    return _written(call, [*(f"d{dim}" for dim in free), "s!"])


def _diagonal_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Write the part of the diagonal that crosses the window."""
    target, source = argument(call, 0, "self"), argument(call, 1, "src")
    offset, row, column = _diagonal_dims(call)
    shape, bounds = call.inputs[0].shape, shards.inputs[0]
    if not is_cut(bounds[row], shape[row]) and not is_cut(bounds[column], shape[column]):
        return run_as_is(call)
    above, left = max(0, -offset), max(0, offset)
    begin = max(bounds[row][0] - above, bounds[column][0] - left, 0)
    end = min(bounds[row][1] - above, bounds[column][1] - left, call.inputs[1].shape[-1])
    if begin >= end:
        return _as_it_is(target)
    builder = LocalProgramBuilder()
    part = builder("aten.slice.Tensor", source, -1, begin, end)
    offset += bounds[row][0] - bounds[column][0]
    return builder.program(builder(call.op, target, part, offset, row, column))


# Places that depend on the data

_COUNTED = "the place of an element depends on how many are picked before it"
_UNKNOWN = opaque("the number of elements depends on the data")


def _picked(*inputs: int) -> Rule:
    """Return the rule of an operator that picks from arguments in the order of their elements."""
    whole, dependences = opaque(_COUNTED), choosing(*inputs, zero=True)
    return Rule(lambda call: replace(whole.notation(call), dependences=dependences))


def _segments(call: OpCall) -> Notation:
    """Return `b* n! d*, b* s! => b* s! d*`: data, lengths (`s!`) or offsets (`o!`).

    Backward: `b* s! d*, b* s! d*, b* n! d*, b* s! => b* n! d*`: gradient, output, data, lengths.
    """
    backward = "backward" in call.op
    ends = "s!" if argument(call, len(call.args), "lengths") is not None else "o!"
    kind = argument(call, 3 if backward else 1, "reduce")
    sums = kind in ("sum", "mean")
    if backward:
        formula = f"b* s! d*, b* s! d*, b* n! d*, b* {ends} => b* n! d*; linear 0"
        clauses = "; increasing 0; unread 1; unread 2" * sums
    else:
        formula = f"b* n! d*, b* {ends} => b* s! d*"
        adds = sums and not call.kwargs.get("initial")
        clauses = f"; {kind} 0" if kind in ("max", "min") else "; linear 0" * adds
    why = "why the elements of a segment depend on the lengths of earlier segments"
    return notation(call, f"{formula}{clauses}; {why}", b=len(call.inputs[-1].shape) - 1)


RULES = by_operator(
    {
        "_segment_reduce_backward segment_reduce": Rule(_segments),
        "as_strided_scatter": stated(
            f"d*!, s*! => d*; {_CHOSEN}; why strides run through the memory of the whole tensor"
        ),
        "diagonal_scatter": Rule(_diagonal, _diagonal_shard),
        "masked_scatter": _picked(0, 2),
        "masked_scatter_backward masked_select": _picked(0),
        "nonzero repeat_interleave.Tensor": _UNKNOWN,
        "nonzero_static": opaque(_COUNTED),
        "select_scatter": Rule(_select, _select_shard),
        "slice_scatter": Rule(_slice, _slice_shard),
    }
)
