"""Sharding rules of operators that cut a dim into pieces, or keep one piece; forward and backward.

A piece is `count` elements, `step` apart, from `start` on. A dim before and after, in notation:

    d => d                       the piece is the whole dim
    (k s!) => k                  every s-th element: equal shards, divisible by s, are cut locally
    d => k!; reduce d sum        any other piece: a rank without its elements returns zeros
    d => ; reduce d sum          one element, and the dim is dropped

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sbp_aten.rules.arrangement import crop_or_pad, movement_notation, zeros
from sbp_aten.rules.formula import by_operator
from sbp_core.graph import Ref
from sbp_core.signatures import (
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
    run_as_is,
    wrap_dim,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Elements of a dim: start, start + step, ..., `count` in all."""

    start: int
    step: int = 1
    count: int = 1

    def within(self, bounds: Range) -> Range:
        """Return the range of the piece's elements that are in a shard of the dim."""
        first = max(0, -((self.start - bounds[0]) // self.step))
        last = min(self.count, -((self.start - bounds[1]) // self.step))
        return first, max(first, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The pieces into which a call cuts dim `dim`; `drops`: each piece is one element, no dim."""

    dim: int
    pieces: tuple[_Piece, ...]
    drops: bool = False

    def dims(self, shape: Sequence[int], index: int) -> tuple[Dims, Dims]:
        """Return the dims of the whole, and the dims of one piece."""
        whole, piece, extent = fresh_dims(len(shape)), self.pieces[index], shape[self.dim]
        before, after = whole[: self.dim], whole[self.dim + 1 :]
        if self.drops:
            return whole, (*before, *after)
        if piece.step == 1 and piece.count == extent:
            return whole, whole
        if len(self.pieces) == 1 and piece.count > 1 and piece.count * piece.step == extent:
            return (*before, ("k", "s"), *after), (*before, ("k",), *after)
        return whole, (*before, (f"k{index}",), *after)


#: Reads the cut from a call and the shape that is cut.
_Read = Callable[[OpCall, Sequence[int]], _Cut]


def _element(index: int) -> _Read:
    """Return the reader of a call with (dim, index) from argument `index` on."""

    def read(call: OpCall, shape: Sequence[int]) -> _Cut:
        dim = wrap_dim(argument(call, index, "dim"), len(shape))
        start = argument(call, index + 1, "index") % shape[dim]
        return _Cut(dim=dim, pieces=(_Piece(start=start),), drops=True)

    return read


def _stretch(index: int, piece: int) -> _Read:
    """Return the reader of a call with (dim, start, end or length, step) from `index` on.

    Args:
        index: Position of `dim`.
        piece: Position of the piece among inputs and outputs.
    """

    def read(call: OpCall, shape: Sequence[int]) -> _Cut:
        dim = wrap_dim(argument(call, index, "dim", 0), len(shape))
        start, step = argument(call, index + 1, "start") or 0, argument(call, index + 3, "step", 1)
        begin = min(max(start + shape[dim] * (start < 0), 0), shape[dim])
        count = (*call.inputs, *call.outputs)[piece].shape[dim]
        return _Cut(dim=dim, pieces=(_Piece(start=begin, step=step, count=count),))

    return read


def _sections(call: OpCall, shape: Sequence[int]) -> _Cut:
    """Read `split`, `split_with_sizes` and the like: the outputs determine the cuts."""
    dim = wrap_dim(argument(call, 2, "dim", 0), len(shape))
    counts = [entry.shape[dim] for entry in call.outputs]
    starts = accumulate(counts, initial=0)
    pieces = (_Piece(start=at, count=count) for at, count in zip(starts, counts, strict=False))
    return _Cut(dim=dim, pieces=tuple(pieces))


def _elements(call: OpCall, shape: Sequence[int]) -> _Cut:
    """Read `unbind`."""
    dim = wrap_dim(argument(call, 1, "dim", 0), len(shape))
    pieces = tuple(_Piece(start=index) for index in range(shape[dim]))
    return _Cut(dim=dim, pieces=pieces, drops=True)


def _names(*tensors: Dims) -> set[str]:
    return {name for dims in tensors for dim in dims for name in dim}


def _selecting(read: _Read) -> Rule:
    """Return the rule of an operator that makes pieces of its argument."""

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        cut = read(call, shape)
        both = [cut.dims(shape, index) for index in range(len(cut.pieces))]
        whole, pieces = both[0][0], [after for _, after in both]
        own = _names(*pieces) - _names(whole) | _names(whole) & {"s"}
        why = "it is a piece of a dim, and is on some of its shards" * bool(own)
        gathered = () if own == {"s"} else whole[cut.dim]
        return movement_notation(call, [whole], pieces, whole=own, why=why, gathered=gathered)

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        shape, held = call.inputs[0].shape, shards.inputs[0]
        cut = read(call, shape)
        bounds, (x, *_), builder = held[cut.dim], call.args, LocalProgramBuilder()
        if bounds == (0, shape[cut.dim]):
            return run_as_is(call)

        def taken(index: int, piece: _Piece) -> Ref:
            first, last = piece.within(bounds)
            start, made = piece.start + piece.step * first - bounds[0], shards.output_shape(index)
            if first == last:
                return zeros(builder, x, made)
            if cut.drops:
                return builder("aten.select.int", x, cut.dim, start)
            end = start + piece.step * (last - first - 1) + 1
            part = builder("aten.slice.Tensor", x, cut.dim, start, end, piece.step)
            wanted = shards.outputs[index][cut.dim]
            return crop_or_pad(builder, part, cut.dim, made, (first, last), wanted)

        return builder.program(*(taken(index, piece) for index, piece in enumerate(cut.pieces)))

    return Rule(meaning, localize)


def _placing(read: _Read) -> Rule:
    """Return the rule of an operator that puts a piece into zeros of a given size."""

    def meaning(call: OpCall) -> Notation:
        shape = call.outputs[0].shape
        cut = read(call, shape)
        whole, piece = cut.dims(shape, 0)
        own = _names(whole) & {"s"}
        why = "it is the distance of two elements" * bool(own)
        gathered = sorted(_names(piece) - _names(whole))
        return movement_notation(
            call, [piece], [whole], whole=own, why=why, gathered=gathered, copies=True
        )

    def localize(call: OpCall, shards: Shards) -> LocalProgram:
        shape, size = call.outputs[0].shape, shards.output_shape()
        cut = read(call, shape)
        (piece,), bounds, (gradient, *_) = cut.pieces, shards.outputs[0][cut.dim], call.args
        first, last = piece.within(bounds)
        start, builder = piece.start + piece.step * first - bounds[0], LocalProgramBuilder()
        if first == last:
            return builder.program(zeros(builder, gradient, size))
        if cut.drops:
            op = "aten.select_backward.default"
            return builder.program(builder(op, gradient, size, cut.dim, start))
        want = (*size[: cut.dim], last - first, *size[cut.dim + 1 :])
        held = shards.inputs[0][cut.dim]
        part = crop_or_pad(builder, gradient, cut.dim, want, held, (first, last))
        end, op = start + piece.step * (last - first - 1) + 1, "aten.slice_backward.default"
        return builder.program(builder(op, part, size, cut.dim, start, end, piece.step))

    return Rule(meaning, localize)


RULES = by_operator(
    {
        "chunk split.Tensor split.sizes split_copy.Tensor split_with_sizes": _selecting(_sections),
        "narrow narrow_copy slice.Tensor slice_copy.Tensor": _selecting(_stretch(1, piece=-1)),
        "select.int select_copy.int": _selecting(_element(1)),
        "select_backward": _placing(_element(2)),
        "slice_backward": _placing(_stretch(2, piece=0)),
        "split_with_sizes_copy tensor_split.indices tensor_split.sections": _selecting(_sections),
        "unbind.int unbind_copy.int": _selecting(_elements),
        "unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes": _selecting(_sections),
    }
)
