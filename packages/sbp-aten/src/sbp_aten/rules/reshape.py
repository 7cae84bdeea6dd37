"""Operators that group dims anew, or add and drop dims of one element.

A shard gets the size of its own part of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import gcd
from operator import eq

from sbp_aten.rules.arrangement import arranged
from sbp_core.signatures import (
    Dim,
    LocalCall,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    labels,
    with_local_shape,
    wrap_dim,
    wrap_dims,
)


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

    `(2, 12)` and `(6, 4)` are (2) (3 4) and (2 3) (4). `(6, 4)` and `(4, 6)` are (2 3) (4) and
    (2 2) (6): after a factor of 2 there is 3 on one side and 2 on the other, and nothing in common.
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

    Factors that they do not share may not be split.
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
    return arranged(call, [left], [right], whole=whole, why=why)


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
    why = "a dim of a tensor without elements has no counterpart"
    return arranged(call, [left], [right], whole=middle[0] + middle[1], why=why * any(middle))


def _reshape_locally(call: OpCall, shards: Shards) -> LocalCall:
    return LocalCall(op="aten.reshape.default", args=(call.args[0], shards.output_shape()))


#: An operator that names the shape of its output otherwise than `view` does.
_RESHAPE = Rule(reshaped, _reshape_locally)


def _squeezed(call: OpCall) -> tuple[int, ...]:
    """Return the dims that go: those asked for, all if none are, that have one element."""
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
    return arranged(call, [dims], [kept])


def _squeeze_locally(call: OpCall, _: Shards) -> LocalCall:
    """Name the dims that go: others may have one element on a shard."""
    return LocalCall(op="aten.squeeze.dims", args=(call.args[0], _squeezed(call)))


def _unsqueeze(call: OpCall) -> Notation:
    dims = fresh_dims(len(call.inputs[0].shape))
    at = wrap_dim(argument(call, 1, "dim"), len(dims) + 1)
    return arranged(call, [dims], [(*dims[:at], (), *dims[at:])])


def _expand(call: OpCall) -> Notation:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    dims = fresh_dims(len(target))
    own = dims[len(target) - len(source) :]
    wide = target[len(target) - len(source) :]
    kept = [dim if old == new else () for dim, old, new in zip(own, source, wide, strict=True)]
    return arranged(call, [kept], [dims])


_EXPAND = Rule(_expand, with_local_shape(1))
_SQUEEZE = Rule(_squeeze, _squeeze_locally)
_UNSQUEEZE = Rule(_unsqueeze)

RULES = {
    "aten._reshape_alias.default": _RESHAPE,
    "aten._reshape_alias_copy.default": _RESHAPE,
    "aten._reshape_copy.default": Rule(reshaped, with_local_shape(1)),
    "aten._unsafe_view.default": Rule(reshaped, with_local_shape(1)),
    "aten.broadcast_to.default": _EXPAND,
    "aten.expand.default": _EXPAND,
    "aten.expand_copy.default": _EXPAND,
    "aten.flatten.using_ints": _RESHAPE,
    "aten.ravel.default": _RESHAPE,
    "aten.reshape.default": Rule(reshaped, with_local_shape(1, "shape")),
    "aten.squeeze.default": _SQUEEZE,
    "aten.squeeze.dim": _SQUEEZE,
    "aten.squeeze.dims": _SQUEEZE,
    "aten.squeeze_copy.default": _SQUEEZE,
    "aten.squeeze_copy.dim": _SQUEEZE,
    "aten.squeeze_copy.dims": _SQUEEZE,
    "aten.unflatten.int": _RESHAPE,
    "aten.unsqueeze.default": _UNSQUEEZE,
    "aten.unsqueeze_copy.default": _UNSQUEEZE,
    "aten.view.default": Rule(reshaped, with_local_shape(1)),
    "aten.view_copy.default": Rule(reshaped, with_local_shape(1)),
}
