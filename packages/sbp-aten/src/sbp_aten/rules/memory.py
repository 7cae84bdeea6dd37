"""Operators that address the memory of a tensor: its bytes, strides, or storage.

Logical tensors lie contiguously, shards need not: they are copied where it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod

from sbp_aten.rules.arrangement import arranged
from sbp_aten.rules.reshape import reshaped
from sbp_core.graph import Ref, Symbol
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
    increasing,
    linear,
    run_as_is,
    unread,
)


def _copied(builder: LocalProgramBuilder, call: OpCall) -> Ref:
    """Return a copy of the first argument that lies contiguously from the begin of its memory."""
    symbol = Symbol("memory_format", "contiguous_format")
    return builder("aten.clone.default", call.args[0], memory_format=symbol)


def _reinterpreted(call: OpCall) -> Notation:
    """`view.dtype`: in the last dim, several small elements make a large one, or the reverse."""
    before, after = call.inputs[0], call.outputs[0]
    dims = fresh_dims(len(before.shape))
    if before.dtype == after.dtype:
        return arranged(call, [dims], [dims])
    sides = [dims, dims]
    whole: set[str] = set()
    if before.shape != after.shape:
        whole = {"bytes"}
        finer = 0 if before.shape[-1] > after.shape[-1] else 1
        sides[finer] = (*dims[:-1], (*dims[-1], *whole))
    return Notation(
        inputs=(sides[0],),
        outputs=(sides[1],),
        whole=frozenset(whole),
        work_flop=None if "_copy." in call.op else 0.0,
        why="they are the bytes of one element" if whole else "",
    )


def _reinterpret(call: OpCall, _: Shards) -> LocalCall | LocalProgram:
    if call.inputs[0].shape == call.outputs[0].shape:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    return builder.program(builder(call.op, _copied(builder, call), *call.args[1:], **call.kwargs))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(extent, 1) for extent in shape[at:]) for at in range(1, len(shape) + 1))


def _is_reshape(call: OpCall) -> bool:
    """Whether `as_strided` gives the elements in the order in which they lie."""
    shape = call.outputs[0].shape
    pairs = zip(argument(call, 2, "stride"), _strides(shape), shape, strict=False)
    usual = all(given == step or extent == 1 for given, step, extent in pairs)
    same = prod(shape) == prod(call.inputs[0].shape)
    return same and usual and not argument(call, 3, "storage_offset")


def _num_batch(call: OpCall) -> int:
    """Return how many leading dims `as_strided` keeps.

    It works within each item of them: beyond, the last item would leave the memory.
    """
    source, target = call.inputs[0].shape, call.outputs[0].shape
    kept = zip(source, target, _strides(source), argument(call, 2, "stride"), strict=False)
    return sum(takewhile(bool, (old == new and usual == own for old, new, usual, own in kept)))


def _strided(call: OpCall) -> Notation:
    if _is_reshape(call):
        return reshaped(call)
    count = _num_batch(call)
    batch = fresh_dims(count, "b")
    left = fresh_dims(len(call.inputs[0].shape) - count, "x")
    right = fresh_dims(len(call.outputs[0].shape) - count, "y")
    return arranged(
        call,
        [(*batch, *left)],
        [(*batch, *right)],
        whole=[name for (name,) in (*left, *right)],
        why="it addresses memory, of which a shard has another layout",
    )


def _stride(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Adapt the strides of dims that are kept to the extents of those behind them."""
    size = shards.output_shape()
    if _is_reshape(call):
        return LocalCall(op="aten.reshape.default", args=(call.args[0], size))
    count = _num_batch(call)
    own = _strides([stop - start for start, stop in shards.inputs[0]])
    strides = (*own[:count], *argument(call, 2, "stride")[count:])
    offset = argument(call, 3, "storage_offset") or 0
    builder = LocalProgramBuilder()
    return builder.program(builder(call.op, _copied(builder, call), size, strides, offset))


def _resized(call: OpCall) -> Notation:
    """`resize`, `resize_as`: as many elements are a reshape; of the template only shape matters."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if prod(source) == prod(target):
        found = reshaped(call)
    else:
        dims = fresh_dims(len(source), "x"), fresh_dims(len(target), "y")
        whole = [name for side in dims for (name,) in side]
        why = "it addresses memory, of which a shard has another layout"
        found = arranged(call, dims[:1], dims[1:], whole=whole, why=why)
    if len(call.inputs) == 1:
        return found
    template: Dims = found.outputs[0]
    return replace(
        found,
        inputs=(*found.inputs, template),
        dependences=(linear(0), increasing(0), unread(1)),
    )


def _resize(call: OpCall, shards: Shards) -> LocalCall:
    size = shards.output_shape()
    if prod(call.inputs[0].shape) == prod(call.outputs[0].shape):
        return LocalCall(op="aten.reshape.default", args=(call.args[0], size))
    return LocalCall(op="aten.resize.default", args=(call.args[0], size))


RULES = {
    "aten.as_strided.default": Rule(_strided, _stride),
    "aten.as_strided_copy.default": Rule(_strided, _stride),
    "aten.resize.default": Rule(_resized, _resize),
    "aten.resize_as.default": Rule(_resized, _resize),
    "aten.view.dtype": Rule(_reinterpreted, _reinterpret),
    "aten.view_copy.dtype": Rule(_reinterpreted, _reinterpret),
}
