"""Sharding rules of reductions: sums over a split dim are partial sums, maxima are partial maxima.

    sum over dim 1     d0 d1 => d0; linear 0
    amax over dim 1    d0 d1+ => d0; max 0; reduce d1 max
    var over dim 1     d0 d1! => d0

Reductions that also return the index of an element (`max.dim`), or need an order (`median`), keep
their dims whole; the latter are in `scans`.

The mean of means is not the mean if shards differ in length. So a rank's part of a mean is the mean
of its elements times its fraction of all elements: the mean is the sum of the parts, and no part is
larger than the mean itself, as sums would be.

Histograms count, or sum weights of, the elements that fall into bins:

    n* x!, n* => bins!, edges!   the elements are summed over; the edges do not depend on them

If no range is given, the extremes of all elements make the edges, and a density is divided by the
sum of all counts: then the elements are needed whole.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

from sbp_aten.rules.formula import by_operator, notation
from sbp_core.graph import Symbol
from sbp_core.signatures import (
    KEYWORD_ONLY,
    Dependence,
    LocalCall,
    Localizer,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    broadcast_shape,
    fresh_dims,
    increasing,
    labels,
    linear,
    maxima,
    minima,
    run_as_is,
    unread,
    with_literals,
    wrap_dims,
)


def part_of_mean(
    call: OpCall, local: int, total: int, without: LocalCall
) -> LocalCall | LocalProgram:
    """Return the program of a rank for its part of a mean (output 0).

    Args:
        call: The mean.
        local: Number of elements (>= 0) that the rank holds.
        total: Number of elements (>= 0) of all ranks.
        without: The call if it holds none, and a mean would be 0 / 0: the sum.
    """
    if local == total:
        return run_as_is(call)
    if local == 0:
        return without
    builder = LocalProgramBuilder()
    mean, *others = builder.several(len(call.outputs), call.op, *call.args, **call.kwargs)
    return builder.program(builder("aten.mul.Scalar", mean, local / total), *others)


def part_of_gradient(call: OpCall, local: int, total: int) -> LocalCall | LocalProgram:
    """Return the program of a rank for its shard of the gradient of a mean.

    The operator divides argument 0, the gradient of the mean, by the number of elements it sees.

    Args:
        call: The backward call.
        local: Number of elements (>= 0) that the rank holds.
        total: Number of elements (>= 0) of all ranks.
    """
    if local in (0, total):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    gradient = builder("aten.mul.Scalar", argument(call, 0, "grad_output"), local / total)
    own = with_literals(call, (0, "grad_output", gradient))
    return builder.program(builder(own.op, *own.args, **own.kwargs))


#: Position of a missing argument: the reduction is over all dims.
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Description of a reduction.

    Args:
        kinds: For each output, how values of parts are combined; empty if they cannot be.
        dependences: Arguments in which it is linear, or passes maxima and minima.
        alone: Additional dependences if only one element is reduced.
        nonempty: Whether it is undefined without elements.
        why: Reason why dims stay whole.
    """

    kinds: tuple[str, ...] = ("",)
    dependences: tuple[Dependence, ...] = ()
    alone: tuple[Dependence, ...] = ()
    nonempty: bool = False
    why: str = ""


#: A single element is its own sum, product, maximum, ...
_SAME = (linear(0), increasing(0))


#: A single element is its own maximum, and its index is 0.
_FIRST = (linear(0, outputs=(0,)), increasing(0, outputs=(0,)))


_SUM = _Way(kinds=("sum",), dependences=(linear(0),), alone=_SAME)


_COUNT = _Way(kinds=("sum",))


_MAX = _Way(kinds=("max",), dependences=(maxima(0),), alone=_SAME, nonempty=True)


_MIN = _Way(kinds=("min",), dependences=(minima(0),), alone=_SAME, nonempty=True)


_MIN_MAX = _Way(kinds=("min", "max"), alone=_SAME, nonempty=True)


_INDEXED = _Way(kinds=("", ""), alone=_FIRST, why="the index counts over all elements of the dim")


_INDEX = replace(_INDEXED, kinds=("",), alone=(unread(0),))


_SPREAD = _Way(why="the spread is measured around the mean of all elements")


_SPREADS = replace(_SPREAD, kinds=("", ""))


_MIDDLE = _Way(alone=_SAME, why="an element is chosen by its rank among all")


_LOG_SUM = _Way(alone=_SAME, why="the logarithm is taken of a sum over all elements")


_HASH = _Way(why="a hash is not a sum, maximum or minimum of the hashes of shards")


def _same(call: OpCall) -> tuple[Dependence, ...]:
    """Return the dependences of a call that does not change its elements.

    Casts may round or wrap, except casts of booleans.
    """
    return _SAME if call.inputs[0].dtype in ("bool", call.outputs[0].dtype) else ()


def _sum(call: OpCall) -> _Way:
    """A sum of booleans as a boolean is their disjunction."""
    kinds = ("max",) if call.outputs[0].dtype == "bool" else ("sum",)
    return replace(_SUM, kinds=kinds, alone=_same(call))


def _nansum(call: OpCall) -> _Way:
    """NaN counts as zero, which is not linear; integers have no NaN."""
    return _COUNT if call.inputs[0].dtype.startswith(("float", "bfloat", "complex")) else _sum(call)


def _product(call: OpCall) -> _Way:
    """A product of booleans is their conjunction."""
    if call.inputs[0].dtype == "bool":
        return _Way(kinds=("min",), dependences=(minima(0),), alone=_same(call))
    return _Way(alone=_same(call), why="partial products are no partial values")


def _logical(kind: str, dependence: Dependence) -> Callable[[OpCall], _Way]:
    """Return the way of a disjunction or conjunction: the maximum or minimum of truth values.

    For partial maxima or minima of numbers that holds only if none is negative.
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
    """Return the reduction of absolute values for a norm of some order; None means 2."""
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
    """Return the notation of a reduction over `dims`, which outputs drop, or keep as 1."""
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
    # A reduction over dims of one element changes nothing (except perhaps the dtype).
    alone = way.alone if all(shape[dim] == 1 for dim in dims) else ()
    # Each output must be a reduction of partial values, or `over` cannot be split. The default
    # reduction of a label is a sum; others are stated, for each output if they differ.
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
    """Return the dims that are reduced: all, if none is given; but `any` over () reduces none."""
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
    """Norm of the difference of two tensors, which are broadcast: `d0 d1, d1 => ()`."""
    wide = broadcast_shape([entry.shape for entry in call.inputs])
    way = _order(argument(call, 2, "p", 2))
    names, (kind,) = list(labels("d", len(wide))), way.kinds
    return replace(
        notation(call, f"..., ... => (); flop {prod(wide)}"),
        whole=frozenset(() if kind else names),
        nonempty=frozenset(names if way.nonempty else ()),
        reductions=tuple((name, kind) for name in names) if kind else (),
        why=way.why,
    )


def _histogram(call: OpCall) -> Notation:
    """Counts of shards add up, if the range does not depend on the elements."""
    free = argument(call, 2, "min", 0) != argument(call, 3, "max", 0)
    why = (
        "each bin may count any element"
        if free
        else "without limits the range is that of all elements"
    )
    return notation(call, f"d*{'' if free else '!'} => bins!; why {why}")


def _bincount(call: OpCall) -> Notation:
    weighted = len(call.inputs) == 2
    text = "n, n => bins!; linear 1" if weighted else "n => bins!"
    return notation(call, f"{text}; why each bin may count any element")


def _localize_bincount(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Every rank makes all bins, whatever its largest item is."""
    items, weights = call.args[0], argument(call, 1, "weights")
    ((start, stop),) = shards.inputs[0]
    (num_bins,) = call.outputs[0].shape
    # `minlength` is the number of bins of the whole call.
    if start < stop or weights is None:
        return LocalCall(op=call.op, args=(items, weights, num_bins))
    # Without items it would return integers even with float weights.
    dtype = Symbol("dtype", call.outputs[0].dtype)
    builder = LocalProgramBuilder()
    return builder.program(builder("aten.new_zeros.default", weights, (num_bins,), dtype=dtype))


def _binned(*, ranged: bool, counts: bool = True, coordinates: bool = False) -> Rule:
    """Return the rule of a histogram: of elements, edges if they are given, and perhaps weights.

    Args:
        ranged: Whether the edges are given.
        counts: Whether output 0 holds counts; the other outputs hold edges.
        coordinates: Whether the last dim (`x`) holds the coordinates of an element.
    """

    def meaning(call: OpCall) -> Notation:
        density, weighted = call.kwargs.get("density"), call.kwargs.get("weight") is not None
        why = "an element may fall into any bin"
        if not ranged and call.kwargs.get("range") is None:
            why = "the extremes of all elements make the edges of the bins"
        elif density:
            why = "a density is divided by the sum of all counts"
        points = "n*" if why.startswith("an ") else "n*!"
        given = range(1, len(call.inputs) - weighted)
        inputs = [points + " x!" * coordinates, *(f"e{at - 1}_*!" for at in given)]
        outputs = [f"o{at}_*!" for at in range(len(call.outputs))]
        edges = "".join(f"; reduce n*@{at} none" for at in range(int(counts), len(outputs)))
        # Weights are summed up, unless the sums are divided by their sum.
        sums = f"; linear {len(call.inputs) - 1} to 0" * (weighted and counts and not density)
        left = ", ".join([*inputs, *[points] * weighted])
        return notation(call, f"{left} => {', '.join(outputs)}{sums}{edges}; why {why}")

    return Rule(meaning)


RULES = by_operator(
    {
        "_histogramdd_bin_edges": _binned(ranged=False, counts=False, coordinates=True),
        "_histogramdd_from_bin_cts": _binned(ranged=False, coordinates=True),
        "_histogramdd_from_bin_tensors": _binned(ranged=True, coordinates=True),
        "all": _over(_ALL, _NONE),
        "all.dim all.dims": _over(_ALL),
        "amax": _over(_MAX),
        "amin": _over(_MIN),
        "aminmax": _over(_MIN_MAX, KEYWORD_ONLY),
        "any": _over(_ANY, _NONE),
        "any.dim any.dims": _over(_ANY),
        "argmax argmin": _over(_INDEX),
        "bincount": Rule(_bincount, _localize_bincount),
        "count_nonzero count_nonzero.dim_IntList": _over(_COUNT),
        "dist": Rule(_distance),
        "hash_tensor": _over(_HASH),
        "histc": Rule(_histogram),
        "histogram.bin_ct": _binned(ranged=False),
        "histogram.bins_tensor": _binned(ranged=True),
        "linalg_vector_norm": _over(_norm("ord"), 2),
        "logsumexp": _over(_LOG_SUM),
        "max": _over(_MAX, _NONE),
        "max.dim min.dim": _over(_INDEXED),
        "mean": _mean(_NONE, "aten.sum.default"),
        "mean.dim": _mean(1, "aten.sum.dim_IntList"),
        "median nanmedian": _over(_MIDDLE, _NONE),
        "min": _over(_MIN, _NONE),
        "nansum": _over(_nansum),
        "norm.Scalar norm.ScalarOpt_dtype": _over(_norm("p"), _NONE),
        "norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype": _over(_norm("p"), 2),
        "prod": _over(_product, _NONE),
        "prod.dim_int": _over(_product),
        "std var": _over(_SPREAD, _NONE),
        "std.correction std.dim var.correction var.dim": _over(_SPREAD),
        "std_mean.correction var_mean.correction": _over(_SPREADS),
        "sum": _over(_sum, _NONE),
        "sum.dim_IntList": _over(_sum),
    }
)
