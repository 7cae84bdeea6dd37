"""Operators on the diagonals of matrices.

A shard with rows from `a` and columns from `c` has diagonal `offset` at `offset + a - c`. Element 0
of a diagonal is in row `max(0, -offset)` and column `max(0, offset)` of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sbp_aten.rules.arrangement import arranged, fitted, zeros
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
    increasing,
    linear,
    unread,
    wrap_dim,
)

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
    with columns; any other has a label of its own.
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
    """Return which elements of the diagonal are in a shard of the matrix."""
    offset, row, column = where
    down, right = max(0, -offset), max(0, offset)
    (top, bottom), (left, end) = matrix[row], matrix[column]
    return max(top - down, left - right), min(bottom - down, end - right)


def _extracting(read: _Read) -> Rule:
    """Return the rule of a diagonal: `i j -> i`, or, if shorter than either side, `i j -> k`.

    A rank with other columns has zeros.
    """

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        where = read(call, len(shape))
        matrix, diagonal = _labels(shape, call.outputs[0].shape[-1], where)
        own = ["k"] if ("k",) in diagonal else []
        sides = [matrix[dim][0] for dim in where[1:]]
        why = "it is shorter than the rows and columns of which it consists" * bool(own)
        return arranged(call, [matrix], [diagonal], whole=own, why=why, gathered=sides)

    def localize(call: OpCall, shards: Shards) -> LocalProgram:
        matrix, shape = shards.inputs[0], shards.output_shape()
        where = offset, row, column = read(call, len(matrix))
        held, builder, (x, *_) = _held(matrix, where), LocalProgramBuilder(), call.args
        if held[0] >= held[1]:
            return builder.program(zeros(builder, x, shape))
        shifted = offset + matrix[row][0] - matrix[column][0]
        found = builder("aten.diagonal.default", x, shifted, row, column)
        wanted = shards.outputs[0][-1]
        return builder.program(fitted(builder, found, len(shape) - 1, shape, held, wanted))

    return Rule(meaning, localize)


def _embedding(read: _Read) -> Rule:
    """Return the rule of a matrix made from a diagonal: `i => i j`, or `k => i j`."""

    def meaning(call: OpCall) -> Notation:
        shape = call.outputs[0].shape
        where = read(call, len(shape))
        matrix, diagonal = _labels(shape, call.inputs[0].shape[-1], where)
        return arranged(call, [diagonal], [matrix], gathered=diagonal[-1], copies=True)

    def localize(call: OpCall, shards: Shards) -> LocalProgram:
        matrix, diagonal = shards.outputs[0], shards.inputs[0]
        where = offset, row, column = read(call, len(matrix))
        wanted, builder, (x, *_) = _held(matrix, where), LocalProgramBuilder(), call.args
        if wanted[0] >= wanted[1]:
            return builder.program(zeros(builder, x, shards.output_shape()))
        shape = [stop - start for start, stop in (*diagonal[:-1], wanted)]
        part = fitted(builder, x, len(shape) - 1, shape, diagonal[-1], wanted)
        shifted = offset + matrix[row][0] - matrix[column][0]
        made = shards.output_shape()
        return builder.program(
            builder("aten.diagonal_backward.default", part, made, shifted, row, column)
        )

    return Rule(meaning, localize)


def _triangle(call: OpCall) -> Notation:
    dims = fresh_dims(len(call.inputs[0].shape))
    found = arranged(call, [dims], [dims], copies=True)
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
    return Notation(
        inputs=(fresh_dims(2),),
        outputs=((),),
        dependences=(linear(0), increasing(0)) if length == 1 else (linear(0),),
        work_flop=float(length),
    )


def _sum_diagonal(call: OpCall, shards: Shards) -> LocalProgram:
    rows, columns = shards.inputs[0]
    builder = LocalProgramBuilder()
    held = builder("aten.diagonal.default", call.args[0], rows[0] - columns[0], 0, 1)
    return builder.program(builder("aten.sum.default", held))


RULES = {
    "aten.diag_embed.default": _embedding(_reader(1, -2, -1)),
    "aten.diagonal.default": _extracting(_reader(1, 0, 1)),
    "aten.diagonal_backward.default": _embedding(_reader(2, 0, 1)),
    "aten.diagonal_copy.default": _extracting(_reader(1, 0, 1)),
    "aten.linalg_diagonal.default": _extracting(_reader(1, -2, -1)),
    "aten.trace.default": Rule(_trace, _sum_diagonal),
    "aten.tril.default": Rule(_triangle, _cut_triangle),
    "aten.triu.default": Rule(_triangle, _cut_triangle),
}
