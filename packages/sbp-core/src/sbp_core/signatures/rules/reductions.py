"""Reductions: a dim that is summed gives partial sums; a mean needs its dims whole.

(A mean of shards of unequal length is no mean of means. It stays linear.)
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from sbp_core.signatures.arguments import argument, labels, wrap_dims
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dim, Notation, linear
from sbp_core.signatures.rule import Rule


def _reduced(call: OpCall, dims: tuple[int, ...], reduction: str) -> Notation:
    """Return the notation of a reduction over `dims` with sum, mean, max or min."""
    shape, made = call.inputs[0].shape, call.outputs[0].shape
    names = list(labels("d", len(shape)))
    keeps = len(made) == len(shape)
    left: list[Dim] = [
        () if dim in dims else (name,) for dim, name in enumerate(names) if keeps or dim not in dims
    ]
    over = [names[dim] for dim in dims]
    extreme = reduction in ("max", "min")
    return Notation(
        inputs=(tuple((name,) for name in names),),
        outputs=(tuple(left),),
        dependences=() if extreme else (linear(0),),
        whole=frozenset(over) if reduction == "mean" else frozenset(),
        # An empty shard has no maximum.
        nonempty=frozenset(over) if extreme else frozenset(),
        reductions=tuple((name, reduction) for name in over) if extreme else (),
        work_flop=float(prod(shape)),
    )


def _along(reduction: str) -> Rule:
    """Return the rule of a reduction with a `dim` argument in second place."""

    def meaning(call: OpCall) -> Notation:
        dims = wrap_dims(argument(call, 1, "dim"), len(call.inputs[0].shape))
        return _reduced(call, dims, reduction)

    return Rule(meaning)


def _all(reduction: str) -> Callable[[OpCall], Notation]:
    """Return the meaning of a reduction over all dims."""

    def meaning(call: OpCall) -> Notation:
        return _reduced(call, tuple(range(len(call.inputs[0].shape))), reduction)

    return meaning


RULES = {
    "aten.amax.default": _along("max"),
    "aten.amin.default": _along("min"),
    "aten.mean.default": Rule(_all("mean")),
    "aten.mean.dim": _along("mean"),
    "aten.sum.default": Rule(_all("sum")),
    "aten.sum.dim_IntList": _along("sum"),
}
