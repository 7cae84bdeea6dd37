"""Writing into a view of a tensor: `select_scatter`, `slice_scatter`, `diagonal_scatter`.

    v d1, s d1 => v d1           slice_scatter(x, source, 0, start, end, step)

Each element of the result is one of the tensor or of the source: linear and increasing in both. A
rank that holds a window of the dim written to writes what falls into it.
"""

from __future__ import annotations

from dataclasses import replace

from sbp_aten.rules.updates import choosing
from sbp_aten.rules.windows import given, is_cut, length
from sbp_core.graph import Ref
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
    fresh_dims,
    linear,
    run_as_is,
    unread,
    wrap_dim,
)

_WHY = "the source is shorter than the tensor there"


def _notation(call: OpCall, source: Dims) -> Notation:
    """Return the notation, given the dims of the source; those of its own (`s0`) are whole."""
    target = fresh_dims(len(call.inputs[0].shape))
    own = {name for dim in source for name in dim if name.startswith("s")}
    return Notation(
        inputs=(target, source),
        outputs=(target,),
        dependences=choosing(0, 1),
        whole=frozenset(own),
        why=_WHY if own else "",
    )


def _as_it_is(target: Ref) -> LocalProgram:
    """Return the program of a rank into whose shard nothing is written."""
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.clone.default", target))


def _select(call: OpCall) -> Notation:
    """Return `d0 d1, d1 => d0 d1` for dim 0: the source is one row of it."""
    dims = fresh_dims(len(call.inputs[0].shape))
    at = wrap_dim(argument(call, 2, "dim"), len(dims))
    return _notation(call, (*dims[:at], *dims[at + 1 :]))


def _select_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Write the row if the window has it."""
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
    shape, source = call.inputs[0].shape, call.inputs[1].shape
    dims = fresh_dims(len(shape))
    at, _, _ = _slice_bounds(call)
    if source == shape:
        every = _notation(call, dims)
        return replace(every, dependences=(*every.dependences, linear(1), unread(0)))
    return _notation(call, (*dims[:at], (f"s{at}",), *dims[at + 1 :]))


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
    _, row, column = _diagonal_dims(call)
    dims = fresh_dims(len(call.inputs[0].shape))
    free = tuple(entry for dim, entry in enumerate(dims) if dim not in (row, column))
    return _notation(call, (*free, ("s",)))


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


def _strided(call: OpCall) -> Notation:
    """Return `d0! d1!, s0! => d0! d1!`."""
    target, source = (
        fresh_dims(len(call.inputs[0].shape)),
        fresh_dims(len(call.inputs[1].shape), "s"),
    )
    return Notation(
        inputs=(target, source),
        outputs=(target,),
        dependences=choosing(0, 1),
        whole=frozenset(name for dim in (*target, *source) for name in dim),
        why="strides run through the memory of the whole tensor",
    )


RULES = {
    "aten.as_strided_scatter.default": Rule(_strided),
    "aten.diagonal_scatter.default": Rule(_diagonal, _diagonal_shard),
    "aten.select_scatter.default": Rule(_select, _select_shard),
    "aten.slice_scatter.default": Rule(_slice, _slice_shard),
}
