"""Operators that only arrange elements: views, slices, joins, and their backward operators.

All are linear, and increasing in each argument; where a size is spelled out, a shard needs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

from sbp_core.signatures.arguments import argument, labels, wrap_dim
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dim, Dims, Notation, increasing, linear
from sbp_core.signatures.rule import Rule, resized


def _view(dims: Sequence[Dim], outputs: Sequence[Sequence[Dim]], whole: Sequence[str]) -> Notation:
    """Return the notation of a view of one tensor."""
    return Notation(
        inputs=(tuple(dims),),
        outputs=tuple(map(tuple, outputs)),
        dependences=(linear(0), increasing(0)),
        whole=frozenset(whole),
        work_flop=0.0,
    )


def _each(num_dims: int) -> list[Dim]:
    """Return one label of its own for each dim."""
    return [(name,) for name in labels("d", num_dims)]


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


def _reshape(call: OpCall) -> Notation:
    """Match groups of dims: only the slowest factor that both sides share may be split."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    sides: tuple[list[Dim], list[Dim]] = ([()] * len(source), [()] * len(target))
    if 0 in source:
        rest = [*labels("x", len(source))], [*labels("y", len(target))]
        return _view([(x,) for x in rest[0]], [[(y,) for y in rest[1]]], rest[0] + rest[1])
    whole: list[str] = []
    for number, dims in enumerate(_groups(source, target)):
        lead = f"g{number}"
        if len(dims[0]) == 1 or len(dims[1]) == 1:
            many = max(dims, key=len)
            names = [lead, *labels(f"{lead}_", len(many) - 1)]
            for side, own in zip(sides, dims, strict=True):
                for dim, name in zip(own, names, strict=False):
                    side[dim] = (name,) if len(own) == len(names) else tuple(names)
            continue
        shared = gcd(source[dims[0][0]], target[dims[1][0]])
        for side, own, shape, mark in zip(sides, dims, (source, target), "xy", strict=True):
            names = [*labels(f"{lead}{mark}", len(own))]
            whole += names
            side[own[0]] = (lead,) if shape[own[0]] == shared else (lead, names[0])
            for dim, name in zip(own[1:], names[1:], strict=True):
                side[dim] = (name,)
    return _view(sides[0], [sides[1]], whole)


def _permuted(order: Callable[[OpCall, int], Sequence[int]]) -> Rule:
    """Return the rule of a view that puts dims into another order."""

    def meaning(call: OpCall) -> Notation:
        dims = _each(len(call.inputs[0].shape))
        return _view(dims, [[dims[dim] for dim in order(call, len(dims))]], ())

    return Rule(meaning)


def _swapped(num_dims: int, first: int, second: int) -> list[int]:
    order = list(range(num_dims))
    if num_dims:
        first, second = wrap_dim(first, num_dims), wrap_dim(second, num_dims)
        order[first], order[second] = order[second], order[first]
    return order


def _unsqueeze(call: OpCall) -> Notation:
    dims = _each(len(call.inputs[0].shape))
    at = wrap_dim(argument(call, 1, "dim"), len(dims) + 1)
    return _view(dims, [[*dims[:at], (), *dims[at:]]], ())


def _squeeze(call: OpCall) -> Notation:
    """A dim that is not of size 1 stays, but its shard could be, so it has to be whole."""
    shape = call.inputs[0].shape
    dims = _each(len(shape))
    at = wrap_dim(argument(call, 1, "dim"), len(dims))
    if len(call.outputs[0].shape) == len(shape):
        return _view(dims, [dims], dims[at] if dims else ())
    dims[at] = ()
    return _view(dims, [dims[:at] + dims[at + 1 :]], ())


def _expand(call: OpCall) -> Notation:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    dims = _each(len(target))
    own = dims[len(target) - len(source) :]
    wide = target[len(target) - len(source) :]
    kept = [dim if old == new else () for dim, old, new in zip(own, source, wide, strict=True)]
    return _view(kept, [dims], ())


def _cut(call: OpCall, dim: int) -> Notation:
    """One dim is cut into pieces, or cut short: it has to be whole unless all of it is kept."""
    shape = call.inputs[0].shape
    before = _each(len(shape))
    dim = wrap_dim(dim, len(shape))
    after = [
        [*before[:dim], before[dim] if kept else (f"k{index}",), *before[dim + 1 :]]
        for index, entry in enumerate(call.outputs)
        for kept in [entry.shape[dim] == shape[dim]]
    ]
    pieces = [names[0] for outputs in after for names in [outputs[dim]]]
    cut = [name for name in pieces if (name,) != before[dim]]
    return _view(before, after, [*cut, *before[dim]] if cut else ())


def _slice(call: OpCall) -> Notation:
    return _cut(call, argument(call, 1, "dim", 0))


def _split(call: OpCall) -> Notation:
    notation = _cut(call, argument(call, 2, "dim", 0))
    dim = wrap_dim(argument(call, 2, "dim", 0), len(call.inputs[0].shape))
    # Even a single piece: a shard that is longer than the piece would be cut again.
    return _view(notation.inputs[0], notation.outputs, [*notation.whole, *notation.inputs[0][dim]])


def _select(call: OpCall) -> Notation:
    """`select` and `unbind`: one dim goes."""
    dims = _each(len(call.inputs[0].shape))
    at = wrap_dim(argument(call, 1, "dim", 0), len(dims))
    left = [*dims[:at], *dims[at + 1 :]]
    return _view(dims, [left] * len(call.outputs), dims[at])


def _padded(call: OpCall) -> Notation:
    """`select_backward` and `slice_backward`: zeros around the gradient, in one dim."""
    gradient, made = call.inputs[0].shape, call.outputs[0].shape
    dims = _each(len(made))
    at = wrap_dim(argument(call, 2, "dim"), len(made))
    cut = gradient != made
    inner: list[Dim] = [("k",) if cut else dims[at]] if len(gradient) == len(made) else []
    return Notation(
        inputs=((*dims[:at], *inner, *dims[at + 1 :]),),
        outputs=(tuple(dims),),
        dependences=(linear(0),),
        whole=frozenset([*dims[at], *(name for dim in inner for name in dim)] if cut else ()),
    )


def _join(call: OpCall, dim: int, stacked: bool) -> Notation:
    made = _each(len(call.outputs[0].shape))
    dim = wrap_dim(dim, len(made))
    inputs: list[Dims] = []
    for index in range(len(call.inputs)):
        own: list[Dim] = [] if stacked else [(f"k{index}",)]
        inputs.append((*made[:dim], *own, *made[dim + 1 :]))
    joined = [f"k{index}" for index in range(len(inputs)) if not stacked]
    return Notation(
        inputs=tuple(inputs),
        outputs=(tuple(made),),
        dependences=(linear(*range(len(inputs))),),
        whole=frozenset([*joined, *made[dim]]),
    )


def _cat(call: OpCall) -> Notation:
    return _join(call, argument(call, 1, "dim", 0), stacked=False)


def _stack(call: OpCall) -> Notation:
    return _join(call, argument(call, 1, "dim", 0), stacked=True)


_SAME = _permuted(lambda _, num_dims: range(num_dims))

RULES = {
    "aten._unsafe_view.default": Rule(_reshape, resized(1)),
    "aten.alias.default": _SAME,
    "aten.cat.default": Rule(_cat),
    "aten.detach.default": _SAME,
    "aten.expand.default": Rule(_expand, resized(1)),
    "aten.permute.default": _permuted(
        lambda call, num_dims: [wrap_dim(dim, num_dims) for dim in argument(call, 1, "dims")]
    ),
    "aten.reshape.default": Rule(_reshape, resized(1, "shape")),
    "aten.select.int": Rule(_select),
    "aten.select_backward.default": Rule(_padded, resized(1, "input_sizes")),
    "aten.slice.Tensor": Rule(_slice),
    "aten.slice_backward.default": Rule(_padded, resized(1, "input_sizes")),
    "aten.split.Tensor": Rule(_split),
    "aten.split_with_sizes.default": Rule(_split),
    "aten.squeeze.dim": Rule(_squeeze),
    "aten.stack.default": Rule(_stack),
    "aten.t.default": _permuted(lambda _, num_dims: range(num_dims)[::-1]),
    "aten.transpose.int": _permuted(
        lambda call, num_dims: _swapped(
            num_dims, argument(call, 1, "dim0"), argument(call, 2, "dim1")
        )
    ),
    "aten.unbind.int": Rule(_select),
    "aten.unsqueeze.default": Rule(_unsqueeze),
    "aten.view.default": Rule(_reshape, resized(1)),
}
