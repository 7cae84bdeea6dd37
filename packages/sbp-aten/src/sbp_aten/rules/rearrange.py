"""Sharding rules of operators that join, repeat or move elements (`cat`, `roll`, ...); diagonals.

For diagonals: a shard with rows from `a` and columns from `c` has diagonal `offset` of the whole
matrix at offset `offset + a - c`. Element 0 of a diagonal is in row `max(0, -offset)` and column
`max(0, offset)` of the whole matrix.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from sbp_aten.rules.arrangement import crop_or_pad, in_order, movement_notation, permute_rule, zeros
from sbp_aten.rules.formula import by_operator, notation
from sbp_core.signatures import (
    Bounds,
    Dim,
    Dims,
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Range,
    Rule,
    Shards,
    argument,
    fresh_dims,
    unread,
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
        if len(entry.shape) != len(shape):  # shape (0,), which may be joined to any other
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
    return movement_notation(call, inputs, [made], whole=own, why=why, copies=True)


def _stack(call: OpCall) -> Notation:
    made = fresh_dims(len(call.outputs[0].shape))
    dim = wrap_dim(argument(call, 1, "dim", 0), len(made))
    part = (*made[:dim], *made[dim + 1 :])
    why = "each part is one element of it"
    inputs = [part] * len(call.inputs)
    return movement_notation(call, inputs, [made], whole=made[dim], why=why, copies=True)


def _chunk_cat(call: OpCall) -> Notation:
    """`b+ x.., b+ y.. => b+ n m`: dims after the leading ones are cut, padded and joined.

    The operator refuses empty parts.
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
    found = movement_notation(call, inputs, [output], whole=whole - free, why=why, copies=True)
    return replace(found, nonempty=frozenset(free))


def _repeat(call: OpCall) -> Notation:
    """`d => r` if a dim repeats: a rank makes its part of `r` from the whole `d`."""
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
    return movement_notation(call, [own], [made], whole=whole, why=why * bool(whole), copies=True)


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
    """Return the shift of `roll` for each dim that it moves.

    Without dims it moves all elements as one row. Then trailing dims may be split if the shift is a
    multiple of their number of elements.
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
    """Leave out dims that do not move; adapt the shift of a row to the shard's trailing dims."""
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
    """Return the order of the dims after `rot90`."""
    order = list(range(num_dims))
    if argument(call, 1, "k", 1) % 2:
        first, second = _plane(call, num_dims)
        order[first], order[second] = second, first
    return order


def _reversed(call: OpCall, num_dims: int) -> tuple[int, ...]:
    """Return the dims that `rot90` flips: the second, both, or the first of its plane."""
    first, second = _plane(call, num_dims)
    return ((), (second,), (first, second), (first,))[argument(call, 1, "k", 1) % 4]


def _plane(call: OpCall, num_dims: int) -> tuple[int, int]:
    first, second = argument(call, 2, "dims", (0, 1))
    return wrap_dim(first, num_dims), wrap_dim(second, num_dims)


# Diagonals

#: From a call and the rank of the matrices: offset, dim of the rows, dim of the columns.
_Read = Callable[[OpCall, int], tuple[int, int, int]]


def _reader(index: int, rows: int, columns: int) -> _Read:
    """Return the reader of a call that has (offset, dim1, dim2) from argument `index` on."""

    def read(call: OpCall, num_dims: int) -> tuple[int, int, int]:
        offset: int = argument(call, index, "offset", 0)
        first = wrap_dim(argument(call, index + 1, "dim1", rows), num_dims)
        second = wrap_dim(argument(call, index + 2, "dim2", columns), num_dims)
        return offset, first, second

    return read


def _labels(shape: Sequence[int], length: int, where: tuple[int, int, int]) -> tuple[Dims, Dims]:
    """Return the dims of a matrix and of its diagonal.

    A diagonal that begins in the first row and ends in the last has the label of the rows, likewise
    with columns; any other diagonal has a separate label.
    """
    offset, row, column = where
    dims = fresh_dims(len(shape))
    diagonal: Dim = ("k",)
    if offset >= 0 and length == shape[row]:
        diagonal = dims[row]
    elif offset <= 0 and length == shape[column]:
        diagonal = dims[column]
    batch = [dims[dim] for dim in range(len(dims)) if dim not in (row, column)]
    return dims, (*batch, diagonal)


def _held(matrix: Bounds, where: tuple[int, int, int]) -> Range:
    """Return the range of the diagonal's elements that are in a shard of the matrix."""
    offset, row, column = where
    down, right = max(0, -offset), max(0, offset)
    (top, bottom), (left, end) = matrix[row], matrix[column]
    return max(top - down, left - right), min(bottom - down, end - right)


def _extracting(read: _Read) -> Rule:
    """Return the rule of a diagonal: `i j -> i`, or, if shorter than both sides, `i j -> k`.

    A rank with other columns returns zeros.
    """

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        where = read(call, len(shape))
        matrix, diagonal = _labels(shape, call.outputs[0].shape[-1], where)
        own = ["k"] if ("k",) in diagonal else []
        sides = [matrix[dim][0] for dim in where[1:]]
        why = "it is shorter than the rows and columns of which it consists" * bool(own)
        return movement_notation(call, [matrix], [diagonal], whole=own, why=why, gathered=sides)

    def localize(call: OpCall, shards: Shards) -> LocalProgram:
        matrix, shape = shards.inputs[0], shards.output_shape()
        where = offset, row, column = read(call, len(matrix))
        held, builder, (x, *_) = _held(matrix, where), LocalProgramBuilder(), call.args
        if held[0] >= held[1]:
            return builder.program(zeros(builder, x, shape))
        shifted = offset + matrix[row][0] - matrix[column][0]
        found = builder("aten.diagonal.default", x, shifted, row, column)
        wanted = shards.outputs[0][-1]
        return builder.program(crop_or_pad(builder, found, len(shape) - 1, shape, held, wanted))

    return Rule(meaning, localize)


def _embedding(read: _Read) -> Rule:
    """Return the rule of a matrix made from a diagonal: `i => i j`, or `k => i j`."""

    def meaning(call: OpCall) -> Notation:
        shape = call.outputs[0].shape
        where = read(call, len(shape))
        matrix, diagonal = _labels(shape, call.inputs[0].shape[-1], where)
        return movement_notation(call, [diagonal], [matrix], gathered=diagonal[-1], copies=True)

    def localize(call: OpCall, shards: Shards) -> LocalProgram:
        matrix, diagonal = shards.outputs[0], shards.inputs[0]
        where = offset, row, column = read(call, len(matrix))
        wanted, builder, (x, *_) = _held(matrix, where), LocalProgramBuilder(), call.args
        if wanted[0] >= wanted[1]:
            return builder.program(zeros(builder, x, shards.output_shape()))
        shape = [stop - start for start, stop in (*diagonal[:-1], wanted)]
        part = crop_or_pad(builder, x, len(shape) - 1, shape, diagonal[-1], wanted)
        shifted = offset + matrix[row][0] - matrix[column][0]
        made = shards.output_shape()
        return builder.program(
            builder("aten.diagonal_backward.default", part, made, shifted, row, column)
        )

    return Rule(meaning, localize)


def _triangle(call: OpCall) -> Notation:
    dims = fresh_dims(len(call.inputs[0].shape))
    found = movement_notation(call, [dims], [dims], copies=True)
    rows, columns = call.inputs[0].shape[-2:]
    offset = argument(call, 1, "diagonal", 0)
    keeps = offset > -rows if call.op == "aten.tril.default" else offset < columns
    return found if keeps else replace(found, dependences=(*found.dependences, unread(0)))


def _cut_triangle(call: OpCall, shards: Shards) -> LocalCall:
    rows, columns = shards.inputs[0][-2:]
    shifted = argument(call, 1, "diagonal", 0) + rows[0] - columns[0]
    return LocalCall(op=call.op, args=(call.args[0], shifted))


def _trace(call: OpCall) -> Notation:
    length = min(call.inputs[0].shape)
    clauses = "linear 0" + "; increasing 0" * (length == 1)
    return notation(call, f"d* => (); {clauses}; flop {length}")


def _sum_diagonal(call: OpCall, shards: Shards) -> LocalProgram:
    rows, columns = shards.inputs[0]
    builder = LocalProgramBuilder()
    held = builder("aten.diagonal.default", call.args[0], rows[0] - columns[0], 0, 1)
    return builder.program(builder("aten.sum.default", held))


_REVERSED = "its order is reversed, across shards"

RULES = by_operator(
    {
        "_chunk_cat": Rule(_chunk_cat),
        "cat concat concatenate": Rule(_cat),
        "diag_embed": _embedding(_reader(1, -2, -1)),
        "diagonal diagonal_copy": _extracting(_reader(1, 0, 1)),
        "diagonal_backward": _embedding(_reader(2, 0, 1)),
        "flip fliplr flipud": permute_rule(in_order, _flipped, _REVERSED, copies=True),
        "linalg_diagonal": _extracting(_reader(1, -2, -1)),
        "repeat tile": Rule(_repeat, _repeat_locally),
        "roll": permute_rule(
            in_order,
            lambda call, num_dims: [*_rolled(call, num_dims)],
            "its elements move on to other shards",
            copies=True,
            localize=_roll_locally,
        ),
        "rot90": permute_rule(_turned, _reversed, _REVERSED, copies=True),
        "stack": Rule(_stack),
        "trace": Rule(_trace, _sum_diagonal),
        "tril triu": Rule(_triangle, _cut_triangle),
    }
)
