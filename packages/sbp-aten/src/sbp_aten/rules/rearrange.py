"""Operators that join, repeat, or move elements: `cat`, `repeat`, `roll`, `flip`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from sbp_aten.rules.arrangement import arranged, in_order, permuted
from sbp_core.signatures import (
    Dim,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    wrap_dim,
    wrap_dims,
)


def _cat(call: OpCall) -> Notation:
    """The joined dim is whole, unless one part is all of it."""
    shape = call.outputs[0].shape
    made = fresh_dims(len(shape))
    dim = wrap_dim(argument(call, 1, "dim", 0), len(shape))
    inputs: list[Sequence[Dim]] = []
    own = {*made[dim]}
    for index, entry in enumerate(call.inputs):
        part: Dim = (f"k{index}",)
        if len(entry.shape) != len(shape):  # of shape (0,), which may stand beside any other
            inputs.append([part])
            own |= {*part}
            continue
        if entry.shape[dim] == shape[dim] and made[dim][0] in own:
            own -= {*made[dim]}
            part = made[dim]
        else:
            own |= {*part}
        inputs.append([*made[:dim], part, *made[dim + 1 :]])
    why = "shards of the parts would interleave" * bool(own)
    return arranged(call, inputs, [made], whole=own, why=why, copies=True)


def _stack(call: OpCall) -> Notation:
    made = fresh_dims(len(call.outputs[0].shape))
    dim = wrap_dim(argument(call, 1, "dim", 0), len(made))
    part = (*made[:dim], *made[dim + 1 :])
    why = "each part is one element of it"
    inputs = [part] * len(call.inputs)
    return arranged(call, inputs, [made], whole=made[dim], why=why, copies=True)


def _chunk_cat(call: OpCall) -> Notation:
    """`b+ x.., b+ y.. => b+ n m`: dims behind the leading ones are cut, padded and joined.

    The operator takes no empty parts.
    """
    num_dims = len(call.inputs[0].shape)
    lead = fresh_dims(wrap_dim(argument(call, 1, "dim"), num_dims), "b")
    inputs = [
        (*lead, *fresh_dims(len(entry.shape) - len(lead), f"x{index}_"))
        for index, entry in enumerate(call.inputs)
    ]
    output = (*lead, ("n",), ("m",))
    whole = {name for dims in (*inputs, output) for dim in dims for name in dim}
    free = {name for dim in lead for name in dim}
    why = "chunks of the parts are joined"
    found = arranged(call, inputs, [output], whole=whole - free, why=why, copies=True)
    return replace(found, nonempty=frozenset(free))


def _repeat(call: OpCall) -> Notation:
    """`d => r` where a dim repeats: a rank of `r` makes its part out of all of `d`."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    made: list[Dim] = list(fresh_dims(len(target)))
    own: list[Dim] = [(f"x{dim}",) for dim in range(len(source))]
    lead = len(target) - len(source)
    for dim, extent in enumerate(source):
        if extent == target[lead + dim]:
            own[dim] = made[lead + dim]
        elif extent == 1:
            own[dim] = ()
    whole = [name for dim in own for name in dim if name[0] == "x"]
    why = "a shard would be a part of every repetition"
    return arranged(call, [own], [made], whole=whole, why=why * bool(whole), copies=True)


def _repeat_locally(call: OpCall, shards: Shards) -> LocalProgram:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    periods = (*[1] * (len(target) - len(source)), *source)
    repeats, builder = [], LocalProgramBuilder()
    cuts: dict[int, tuple[int, int]] = {}
    for dim, (period, (start, stop)) in enumerate(zip(periods, shards.outputs[0], strict=True)):
        if dim >= len(target) - len(source) and period == target[dim]:
            repeats.append(1)
            continue
        first, last = start // period, -(-stop // period)
        repeats.append(last - first)
        begin = start - first * period
        if (begin, stop - start) != (0, (last - first) * period):
            cuts[dim] = begin, begin + stop - start
    made = builder("aten.repeat.default", call.args[0], tuple(repeats))
    for dim, (start, stop) in cuts.items():
        made = builder("aten.slice.Tensor", made, dim, start, stop)
    return builder.program(made)


def _rolled(call: OpCall, num_dims: int) -> dict[int, int]:
    """Return by how much `roll` moves the elements of each dim that it moves.

    Without dims it moves all elements as one row: then the moves are of that row, and dims behind
    are free if they have as many elements as it moves by, or a divisor of it.
    """
    shape = call.inputs[0].shape
    shifts, dims = argument(call, 1, "shifts"), argument(call, 2, "dims", ())
    shifts, dims = ((entry,) if isinstance(entry, int) else entry for entry in (shifts, dims))
    moves = dict.fromkeys(range(num_dims), 0)
    if not dims:
        moves = dict.fromkeys(range(num_dims), shifts[0]) if prod(shape) else {}
        return {dim: by for dim, by in moves.items() if by % prod(shape[dim:])}
    for dim, shift in zip(dims, shifts, strict=True):
        moves[wrap_dim(dim, num_dims)] += shift
    return {dim: by for dim, by in moves.items() if by % max(shape[dim], 1)}


def _roll_locally(call: OpCall, shards: Shards) -> LocalCall:
    """Leave out dims that do not move; a row moves by as much as a shard has of what is free."""
    shape, size, x = call.inputs[0].shape, shards.output_shape(), call.args[0]
    moves = _rolled(call, len(shape))
    if not moves:
        return LocalCall(op="aten.alias.default", args=(x,))
    if argument(call, 2, "dims", ()):
        return LocalCall(op=call.op, args=(x, tuple(moves.values()), tuple(moves)))
    whole, free = (prod(sizes[len(moves) :]) for sizes in (shape, size))
    return LocalCall(op=call.op, args=(x, (moves[0] // max(whole, 1) * free,)))


def _flipped(call: OpCall, num_dims: int) -> tuple[int, ...]:
    dims = {"aten.fliplr.default": (1,), "aten.flipud.default": (0,)}.get(call.op)
    asked = dims or argument(call, 1, "dims")
    return wrap_dims(asked, num_dims) if asked else ()


def _turned(call: OpCall, num_dims: int) -> list[int]:
    """Return the order of dims after `rot90`."""
    order = list(range(num_dims))
    if argument(call, 1, "k", 1) % 2:
        first, second = _plane(call, num_dims)
        order[first], order[second] = second, first
    return order


def _reversed(call: OpCall, num_dims: int) -> tuple[int, ...]:
    """Return the dims that `rot90` reverses: the second, both, or the first of its plane."""
    first, second = _plane(call, num_dims)
    return ((), (second,), (first, second), (first,))[argument(call, 1, "k", 1) % 4]


def _plane(call: OpCall, num_dims: int) -> tuple[int, int]:
    first, second = argument(call, 2, "dims", (0, 1))
    return wrap_dim(first, num_dims), wrap_dim(second, num_dims)


_REVERSED = "its order is reversed, across shards"
_FLIP = permuted(in_order, _flipped, _REVERSED, copies=True)
_REPEAT = Rule(_repeat, _repeat_locally)

RULES = {
    "aten._chunk_cat.default": Rule(_chunk_cat),
    "aten.cat.default": Rule(_cat),
    "aten.concat.default": Rule(_cat),
    "aten.concatenate.default": Rule(_cat),
    "aten.flip.default": _FLIP,
    "aten.fliplr.default": _FLIP,
    "aten.flipud.default": _FLIP,
    "aten.repeat.default": _REPEAT,
    "aten.roll.default": permuted(
        in_order,
        lambda call, num_dims: [*_rolled(call, num_dims)],
        "its elements move on to other shards",
        copies=True,
        localize=_roll_locally,
    ),
    "aten.rot90.default": permuted(_turned, _reversed, _REVERSED, copies=True),
    "aten.stack.default": Rule(_stack),
    "aten.tile.default": _REPEAT,
}
