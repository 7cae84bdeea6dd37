"""Reductions: a dim that is summed gives partial sums, one whose maximum is taken partial maxima.

    sum over dim 1     d0 d1 => d0; linear 0
    amax over dim 1    d0 d1+ => d0; max 0; reduce d1 max
    var over dim 1     d0 d1! => d0

A mean over a dim is summed like `sum`; see `means`. Reductions that also say where an element was
(`max.dim`) or that need an order (`median`) keep their dims whole; the latter are in `scans`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

from sbp_aten.rules.means import part_of_mean
from sbp_core.graph import Symbol
from sbp_core.signatures import (
    KEYWORD_ONLY,
    Dependence,
    Dims,
    LocalCall,
    Localizer,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    broadcast_dims,
    broadcast_shape,
    fresh_dims,
    increasing,
    labels,
    linear,
    maxima,
    minima,
    run_as_is,
    unread,
    wrap_dims,
)

#: Position of an argument that is not there: the reduction is over all dims.
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How elements are reduced.

    Args:
        kinds: For each output, the reduction of partial values that it is; empty: of none.
        dependences: In what it is linear, or passes maxima and minima.
        alone: The same where only one element is to be reduced; empty: no more than otherwise.
        nonempty: Whether it has no value without elements.
        why: Why dims stay whole.
    """

    kinds: tuple[str, ...] = ("",)
    dependences: tuple[Dependence, ...] = ()
    alone: tuple[Dependence, ...] = ()
    nonempty: bool = False
    why: str = ""


#: One element alone is its own sum, product, maximum, ...
_SAME = (linear(0), increasing(0))

#: It is its own maximum, and its index is 0.
_FIRST = (linear(0, outputs=(0,)), increasing(0, outputs=(0,)))

_SUM = _Way(kinds=("sum",), dependences=(linear(0),), alone=_SAME)
_COUNT = _Way(kinds=("sum",))
_MAX = _Way(kinds=("max",), dependences=(maxima(0),), alone=_SAME, nonempty=True)
_MIN = _Way(kinds=("min",), dependences=(minima(0),), alone=_SAME, nonempty=True)
_MIN_MAX = _Way(kinds=("min", "max"), alone=_SAME, nonempty=True)
_INDEXED = _Way(kinds=("", ""), alone=_FIRST, why="the index counts over all elements of the dim")
_INDEX = replace(_INDEXED, kinds=("",), alone=(unread(0),))
_SPREAD = _Way(why="the spread is one around the mean of all elements")
_SPREADS = replace(_SPREAD, kinds=("", ""))
_MIDDLE = _Way(alone=_SAME, why="an element is chosen by its rank among all")
_LOG_SUM = _Way(alone=_SAME, why="the logarithm is one of a sum over all elements")
_HASH = _Way(why="a hash is no sum, maximum or minimum of those of the shards")


def _same(call: OpCall) -> tuple[Dependence, ...]:
    """Return in what a call is linear or monotone that leaves its elements as they are.

    Casts may round or wrap, but for those of booleans.
    """
    return _SAME if call.inputs[0].dtype in ("bool", call.outputs[0].dtype) else ()


def _sum(call: OpCall) -> _Way:
    """A sum of booleans that is a boolean is their disjunction."""
    kinds = ("max",) if call.outputs[0].dtype == "bool" else ("sum",)
    return replace(_SUM, kinds=kinds, alone=_same(call))


def _nansum(call: OpCall) -> _Way:
    """What is not a number counts as zero, which is not linear; integers are all numbers."""
    return _COUNT if call.inputs[0].dtype.startswith(("float", "bfloat", "complex")) else _sum(call)


def _product(call: OpCall) -> _Way:
    """A product of booleans is their conjunction."""
    if call.inputs[0].dtype == "bool":
        return _Way(kinds=("min",), dependences=(minima(0),), alone=_same(call))
    return _Way(alone=_same(call), why="partial products are no partial values")


def _logical(kind: str, dependence: Dependence) -> Callable[[OpCall], _Way]:
    """Return the way of a disjunction or conjunction: the maximum or minimum of truth values.

    Those of partial values are so only if none is negative.
    """

    def way(call: OpCall) -> _Way:
        dtype = call.inputs[0].dtype
        return _Way(
            kinds=(kind,),
            dependences=(dependence,) if dtype in ("bool", "uint8") else (),
            alone=_SAME if dtype == "bool" else (),
        )

    return way


_ANY = _logical("max", maxima(0))
_ALL = _logical("min", minima(0))


def _order(power: object) -> _Way:
    """Return how absolute values are reduced to a norm of some order; None means 2."""
    ways = {
        0.0: _COUNT,
        1.0: _COUNT,
        inf: _Way(kinds=("max",), nonempty=True),
        -inf: _Way(kinds=("min",), nonempty=True),
    }
    number = 2.0 if power is None else float(power) if isinstance(power, int | float) else 2.0
    return ways.get(number, _Way(why="the norm is a root of a sum over all elements"))


def _norm(name: str) -> Callable[[OpCall], _Way]:
    return lambda call: _order(argument(call, 1, name, 2))


def _notation(call: OpCall, dims: tuple[int, ...], way: _Way) -> Notation:
    """Return the notation of a reduction over `dims`, which outputs lack, or keep as 1."""
    shape = call.inputs[0].shape
    names = list(labels("d", len(shape)))
    over = [names[dim] for dim in dims]
    outputs = [
        tuple(
            () if dim in dims else (name,)
            for dim, name in enumerate(names)
            if dim not in dims or len(entry.shape) == len(shape)
        )
        for entry in call.outputs
    ]
    # Over dims of one element the reduction changes nothing (but perhaps the dtype).
    alone = way.alone if all(shape[dim] == 1 for dim in dims) else ()
    # Each output must be a reduction of partial values, or a split of `over` has no meaning for it.
    # A sum is what a label is reduced with unless something else is said, per output if they
    # differ.
    split = all(way.kinds)
    alike = len(set(way.kinds)) == 1
    return Notation(
        inputs=(fresh_dims(len(shape)),),
        outputs=tuple(outputs),
        dependences=alone or way.dependences,
        whole=frozenset(() if split else over),
        nonempty=frozenset(over if split and way.nonempty else ()),
        reductions=tuple(
            (name if alike else f"{name}@{index}", kind)
            for index, kind in enumerate(way.kinds[:1] if alike else way.kinds)
            for name in over
            if kind not in ("", "sum")
        ),
        work_flop=float(prod(shape)),
        why=way.why,
    )


def _over(
    way: _Way | Callable[[OpCall], _Way], index: int = 1, localize: Localizer | None = None
) -> Rule:
    """Return the rule of a reduction over the dims named by argument `index`, `dim`."""

    def meaning(call: OpCall) -> Notation:
        found = way if isinstance(way, _Way) else way(call)
        return _notation(call, _dims(call, index), found)

    return Rule(meaning, localize)


def _dims(call: OpCall, index: int) -> tuple[int, ...]:
    """Return the dims that are reduced: all, if none is named; but `any` over () leaves all."""
    named = None if index == _NONE else argument(call, index, "dim")
    if named == () and call.op in ("aten.any.dims", "aten.all.dims"):
        return ()
    return wrap_dims(named, len(call.inputs[0].shape))


def _mean(index: int, total: str) -> Rule:
    """Return the rule of a mean; `total` is the sum over the same dims."""

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        shape, bounds = call.inputs[0].shape, shards.inputs[0]
        dims = _dims(call, index)
        local = prod(bounds[dim][1] - bounds[dim][0] for dim in dims)
        summed = replace(run_as_is(call), op=total)
        return part_of_mean(call, local, prod(shape[dim] for dim in dims), summed)

    return _over(_SUM, index, localize)


def _distance(call: OpCall) -> Notation:
    """A norm of the difference of two tensors, which are broadcast: `d0 d1, d1 => ()`."""
    pair = [entry.shape for entry in call.inputs]
    wide = broadcast_shape(pair)
    way = _order(argument(call, 2, "p", 2))
    names = list(labels("d", len(wide)))
    (kind,) = way.kinds
    return Notation(
        inputs=tuple(broadcast_dims(shape, wide) for shape in pair),
        outputs=((),),
        whole=frozenset(() if kind else names),
        nonempty=frozenset(names if way.nonempty else ()),
        reductions=tuple((name, kind) for name in names) if kind else (),
        work_flop=float(prod(wide)),
        why=way.why,
    )


def _histogram(call: OpCall) -> Notation:
    """`d0 d1 => bins!`: counts of shards add up, if the range does not hang on the elements."""
    dims: Dims = fresh_dims(len(call.inputs[0].shape))
    limits = argument(call, 2, "min", 0), argument(call, 3, "max", 0)
    free = limits[0] != limits[1]
    return Notation(
        inputs=(dims,),
        outputs=((("bins",),),),
        whole=frozenset(["bins"] if free else ["bins", *(name for (name,) in dims)]),
        why="each bin may count any element"
        if free
        else "without limits the range is that of all elements",
    )


def _bincount(call: OpCall) -> Notation:
    items: Dims = (("n",),)
    return Notation(
        inputs=(items,) * len(call.inputs),
        outputs=((("bins",),),),
        dependences=(linear(1),) if len(call.inputs) == 2 else (),
        whole=frozenset({"bins"}),
        why="each bin may count any element",
    )


def _localize_bincount(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Every rank makes all bins, whatever the largest of its items is."""
    items, weights = call.args[0], argument(call, 1, "weights")
    ((start, stop),) = shards.inputs[0]
    (num_bins,) = call.outputs[0].shape
    # `minlength` is as many bins as the whole call makes.
    if start < stop or weights is None:
        return LocalCall(op=call.op, args=(items, weights, num_bins))
    # Without items it would make integers whatever the weights are.
    dtype = Symbol("dtype", call.outputs[0].dtype)
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.new_zeros.default", weights, (num_bins,), dtype=dtype))


RULES = {
    "aten.all.default": _over(_ALL, _NONE),
    "aten.all.dim": _over(_ALL),
    "aten.all.dims": _over(_ALL),
    "aten.amax.default": _over(_MAX),
    "aten.amin.default": _over(_MIN),
    "aten.aminmax.default": _over(_MIN_MAX, KEYWORD_ONLY),
    "aten.any.default": _over(_ANY, _NONE),
    "aten.any.dim": _over(_ANY),
    "aten.any.dims": _over(_ANY),
    "aten.argmax.default": _over(_INDEX),
    "aten.argmin.default": _over(_INDEX),
    "aten.bincount.default": Rule(_bincount, _localize_bincount),
    "aten.count_nonzero.default": _over(_COUNT),
    "aten.count_nonzero.dim_IntList": _over(_COUNT),
    "aten.dist.default": Rule(_distance),
    "aten.hash_tensor.default": _over(_HASH),
    "aten.histc.default": Rule(_histogram),
    "aten.linalg_vector_norm.default": _over(_norm("ord"), 2),
    "aten.logsumexp.default": _over(_LOG_SUM),
    "aten.max.default": _over(_MAX, _NONE),
    "aten.max.dim": _over(_INDEXED),
    "aten.mean.default": _mean(_NONE, "aten.sum.default"),
    "aten.mean.dim": _mean(1, "aten.sum.dim_IntList"),
    "aten.median.default": _over(_MIDDLE, _NONE),
    "aten.min.default": _over(_MIN, _NONE),
    "aten.min.dim": _over(_INDEXED),
    "aten.nanmedian.default": _over(_MIDDLE, _NONE),
    "aten.nansum.default": _over(_nansum),
    "aten.norm.Scalar": _over(_norm("p"), _NONE),
    "aten.norm.ScalarOpt_dim": _over(_norm("p"), 2),
    "aten.norm.ScalarOpt_dim_dtype": _over(_norm("p"), 2),
    "aten.norm.ScalarOpt_dtype": _over(_norm("p"), _NONE),
    "aten.prod.default": _over(_product, _NONE),
    "aten.prod.dim_int": _over(_product),
    "aten.std.correction": _over(_SPREAD),
    "aten.std.default": _over(_SPREAD, _NONE),
    "aten.std.dim": _over(_SPREAD),
    "aten.std_mean.correction": _over(_SPREADS),
    "aten.sum.default": _over(_sum, _NONE),
    "aten.sum.dim_IntList": _over(_sum),
    "aten.var.correction": _over(_SPREAD),
    "aten.var.default": _over(_SPREAD, _NONE),
    "aten.var.dim": _over(_SPREAD),
    "aten.var_mean.correction": _over(_SPREADS),
}
