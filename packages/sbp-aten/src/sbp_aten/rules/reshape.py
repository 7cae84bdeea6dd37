"""Sharding rules of views: other orders and groupings of dims, added and dropped dims, strides.

They permute dims, regroup them (`reshape`), add and drop dims of one element, or address the memory
of a tensor: its bytes, strides, or storage. A shard is given the size of its part of the output.
Logical tensors are contiguous; shards need not be, so they are copied where it matters.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from math import gcd, prod
from operator import eq

from sbp_aten.rules.arrangement import in_order, movement_notation, permute_rule
from sbp_aten.rules.formula import by_operator, notation
from sbp_core.graph import Ref, Symbol
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
    broadcast_dims,
    fresh_dims,
    increasing,
    labels,
    linear,
    run_as_is,
    unread,
    with_local_shape,
    wrap_dim,
    wrap_dims,
)


def _swapped(call: OpCall, num_dims: int) -> list[int]:
    order = list(range(num_dims))
    if num_dims:
        names = ("axis0", "axis1") if call.op == "aten.swapaxes.default" else ("dim0", "dim1")
        first, second = (
            wrap_dim(argument(call, index, name), num_dims) for index, name in enumerate(names, 1)
        )
        order[first], order[second] = order[second], order[first]
    return order


def _moved(call: OpCall, num_dims: int) -> list[int]:
    both = argument(call, 1, "source"), argument(call, 2, "destination")
    dims, places = ((entry,) if isinstance(entry, int) else entry for entry in both)
    placed = {
        wrap_dim(place, num_dims): wrap_dim(dim, num_dims)
        for dim, place in zip(dims, places, strict=True)
    }
    others = iter([dim for dim in range(num_dims) if dim not in placed.values()])
    return [placed[at] if at in placed else next(others) for at in range(num_dims)]


def _groups(
    source: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield minimal groups of source dims and target dims with equal products; no dim of size 1.

    `(6, 4) -> (2, 3, 4)` yields ((0,), (0, 1)) and ((1,), (2,)).
    """
    left = [dim for dim, extent in enumerate(source) if extent != 1]
    right = [dim for dim, extent in enumerate(target) if extent != 1]
    while left or right:
        here, there = [left.pop(0)], [right.pop(0)]
        have, want = source[here[0]], target[there[0]]
        while have != want:
            if have < want:
                here.append(left.pop(0))
                have *= source[here[-1]]
            else:
                there.append(right.pop(0))
                want *= target[there[-1]]
        yield tuple(here), tuple(there)


def _common_factors(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source dim, target dim, factor), slowest first, while both sides share a factor.

    `(2, 12)` and `(6, 4)` are (2) (3 4) and (2 3) (4). `(6, 4)` and `(4, 6)` are (2 3) (4) and (2
    2) (6): after a factor of 2 there is 3 on one side and 2 on the other, without a common factor.
    """
    here = there = 0
    left, right = source[0], target[0]
    while (factor := gcd(left, right)) > 1:
        yield here, there, factor
        left, right = left // factor, right // factor
        if left == 1:
            here += 1
            left = source[here] if here < len(source) else 1
        if right == 1:
            there += 1
            right = target[there] if there < len(target) else 1


def reshaped(call: OpCall) -> Notation:
    """Return dims as groups of the factors that both sides share: `(a b) c -> a (b c)`.

    Factors that are not shared may not be split.
    """
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if 0 in source:
        return _reshaped_empty(call)
    sides: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    whole: list[str] = []
    for number, dims in enumerate(_groups(source, target)):
        extents = [source[dim] for dim in dims[0]], [target[dim] for dim in dims[1]]
        rest = list(extents[0]), list(extents[1])
        for count, (*at, factor) in enumerate(_common_factors(*extents)):
            label = f"g{number}_{count}" if count else f"g{number}"
            for side in (0, 1):
                rest[side][at[side]] //= factor
                sides[side][dims[side][at[side]]].append(label)
        for side, mark in enumerate("xy"):
            for at_dim, dim in enumerate(dims[side]):
                if rest[side][at_dim] > 1:
                    whole.append(f"g{number}{mark}{at_dim}")
                    sides[side][dim].append(whole[-1])
    why = f"its factors do not line up with those of {target}" if whole else ""
    left, right = (tuple(map(tuple, side)) for side in sides)
    return movement_notation(call, [left], [right], whole=whole, why=why)


def _reshaped_empty(call: OpCall) -> Notation:
    """Without elements, only dims that are equal from the front, or from the back, correspond."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    front = sum(takewhile(bool, map(eq, source, target)))
    behind = min(len(source), len(target)) - front
    back = sum(takewhile(bool, map(eq, source[: -behind - 1 : -1], target[: -behind - 1 : -1])))
    back = min(back, behind)
    ends = [*labels("d", front)], [*labels("e", back)]
    middle = (
        [*labels("x", len(source) - front - back)],
        [*labels("y", len(target) - front - back)],
    )
    left, right = ([(name,) for name in (*ends[0], *names, *ends[1])] for names in middle)
    why = "a dim of a tensor without elements has no counterpart" * any(middle)
    return movement_notation(call, [left], [right], whole=middle[0] + middle[1], why=why)


def _reshape_locally(call: OpCall, shards: Shards) -> LocalCall:
    return LocalCall(op="aten.reshape.default", args=(call.args[0], shards.output_shape()))


def _squeezed(call: OpCall) -> tuple[int, ...]:
    """Return the dims that are dropped: the requested dims (or all) with one element."""
    shape = call.inputs[0].shape
    if call.op.endswith(".default"):
        return tuple(dim for dim, extent in enumerate(shape) if extent == 1)
    asked = argument(call, 1, "dim")
    dims = () if asked == () else wrap_dims(asked, len(shape))
    return tuple(dim for dim in dims if shape[dim] == 1)


def _squeeze(call: OpCall) -> Notation:
    dropped = _squeezed(call)
    dims: list[Dim] = list(fresh_dims(len(call.inputs[0].shape)))
    for dim in dropped:
        dims[dim] = ()
    kept = [dims[dim] for dim in range(len(dims)) if dim not in dropped]
    return movement_notation(call, [dims], [kept])


def _squeeze_locally(call: OpCall, _: Shards) -> LocalCall:
    """Name the dims to drop, because other dims may have one element on a shard."""
    return LocalCall(op="aten.squeeze.dims", args=(call.args[0], _squeezed(call)))


def _unsqueeze(call: OpCall) -> Notation:
    rank = len(call.inputs[0].shape)
    dims = fresh_dims(rank)
    at = wrap_dim(argument(call, 1, "dim"), rank + 1)
    return movement_notation(call, [dims], [(*dims[:at], (), *dims[at:])])


def _expand(call: OpCall) -> Notation:
    dims = fresh_dims(len(call.outputs[0].shape))
    own = broadcast_dims(call.inputs[0].shape, call.outputs[0].shape)
    return movement_notation(call, [own], [dims])


# Memory

_ADDRESSED = "it addresses memory, and a shard has another memory layout"


def _copied(builder: LocalProgramBuilder, call: OpCall) -> Ref:
    """Return a contiguous copy of the first argument, at offset 0 of its storage."""
    symbol = Symbol("memory_format", "contiguous_format")
    return builder("aten.clone.default", call.args[0], memory_format=symbol)


def _reinterpreted(call: OpCall) -> Notation:
    """`view.dtype`: in the last dim, several small elements make a large one, or the reverse."""
    before, after = call.inputs[0], call.outputs[0]
    dims = fresh_dims(len(before.shape))
    if before.dtype == after.dtype:
        return movement_notation(call, [dims], [dims])
    names = [name for (name,) in dims]
    sides = [" ".join(names)] * 2
    if before.shape != after.shape:
        finer = 0 if before.shape[-1] > after.shape[-1] else 1
        sides[finer] = " ".join([*names[:-1], f"({names[-1]} bytes!)"])
    work = "" if "_copy." in call.op else "; flop 0"
    return notation(call, f"{' => '.join(sides)}{work}; why they are the bytes of one element")


def _reinterpret(call: OpCall, _: Shards) -> LocalCall | LocalProgram:
    if call.inputs[0].shape == call.outputs[0].shape:
        return run_as_is(call)
    builder = LocalProgramBuilder()
    return builder.program(builder(call.op, _copied(builder, call), *call.args[1:], **call.kwargs))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(max(extent, 1) for extent in shape[at:]) for at in range(1, len(shape) + 1))


def _is_reshape(call: OpCall) -> bool:
    """Whether `as_strided` returns the elements in memory order."""
    shape = call.outputs[0].shape
    pairs = zip(argument(call, 2, "stride"), _strides(shape), shape, strict=False)
    usual = all(given == step or extent == 1 for given, step, extent in pairs)
    same = prod(shape) == prod(call.inputs[0].shape)
    return same and usual and not argument(call, 3, "storage_offset")


def _num_batch(call: OpCall) -> int:
    """Return the number of leading dims that `as_strided` keeps.

    It has to stay within each item of these dims, or the last item would exceed the memory.
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
    own = [name for (name,) in (*left, *right)]
    return movement_notation(call, [(*batch, *left)], [(*batch, *right)], whole=own, why=_ADDRESSED)


def _stride(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Adapt the strides of the kept dims to the local extents of the dims after them."""
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
    """`resize`, `resize_as`: a reshape if the number of elements is equal; reads only a shape."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if prod(source) == prod(target):
        found = reshaped(call)
    else:
        dims = fresh_dims(len(source), "x"), fresh_dims(len(target), "y")
        whole = [name for side in dims for (name,) in side]
        found = movement_notation(call, dims[:1], dims[1:], whole=whole, why=_ADDRESSED)
    if len(call.inputs) == 1:
        return found
    dependences = (linear(0), increasing(0), unread(1))
    return replace(found, inputs=(*found.inputs, found.outputs[0]), dependences=dependences)


def _resize(call: OpCall, shards: Shards) -> LocalCall:
    same = prod(call.inputs[0].shape) == prod(call.outputs[0].shape)
    op = "aten.reshape.default" if same else "aten.resize.default"
    return LocalCall(op=op, args=(call.args[0], shards.output_shape()))


_PERMUTE = permute_rule(
    lambda call, num_dims: [wrap_dim(dim, num_dims) for dim in argument(call, 1, "dims")]
)
_REVERSE = permute_rule(lambda _, num_dims: range(num_dims)[::-1])
_TURN = permute_rule(lambda _, num_dims: [*range(num_dims - 2), num_dims - 1, num_dims - 2])

RULES = by_operator(
    {
        "_reshape_alias _reshape_alias_copy flatten.using_ints ravel unflatten.int": Rule(
            reshaped, _reshape_locally
        ),
        "_reshape_copy _unsafe_view view view_copy": Rule(reshaped, with_local_shape(1)),
        "alias alias_copy detach detach_copy lift lift_fresh lift_fresh_copy": permute_rule(
            in_order
        ),
        "as_strided as_strided_copy": Rule(_strided, _stride),
        "broadcast_to expand expand_copy": Rule(_expand, with_local_shape(1)),
        "mT": _TURN,
        "moveaxis.int moveaxis.intlist movedim.int movedim.intlist": permute_rule(_moved),
        "numpy_T t t_copy": _REVERSE,
        "permute permute_copy": _PERMUTE,
        "reshape": Rule(reshaped, with_local_shape(1, "shape")),
        "resize resize_as": Rule(_resized, _resize),
        "squeeze squeeze.dim squeeze.dims": Rule(_squeeze, _squeeze_locally),
        "squeeze_copy squeeze_copy.dim squeeze_copy.dims": Rule(_squeeze, _squeeze_locally),
        "swapaxes swapdims transpose.int transpose_copy.int": permute_rule(_swapped),
        "unsqueeze unsqueeze_copy": Rule(_unsqueeze),
        "view.dtype view_copy.dtype": Rule(_reinterpreted, _reinterpret),
    }
)
