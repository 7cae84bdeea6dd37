"""Sharding rules of operators that run along one dim: running sums, sorting, order statistics.

Only the other dims may be split. In notation:

    cumsum(dim=1)     d0 t0_1! d2 => d0 t1_1! d2; linear 0
    topk(3, dim=1)    d0 t0_1! => d0 t1_1!, d0 t2_1!

Operators that find distinct elements are here, too; they are not split at all.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from sbp_aten.rules.formula import by_operator, notation
from sbp_core.signatures import (
    KEYWORD_ONLY,
    Dependence,
    Notation,
    OpCall,
    Rule,
    along,
    argument,
    increasing,
    linear,
    opaque,
    wrap_dim,
    wrap_dims,
)

_BEFORE = "each element comes from all before it"
_SORTED = "its elements are put into one order"
_RANKED = "an element is chosen by its rank among all"
_DISTINCT = "which elements are distinct, and how many, is known when all are compared"


def _renorm(call: OpCall) -> Notation:
    """Each slice along one dim is scaled to a norm: `d0 d1! => d0 d1!` for `dim=0`."""
    rank = len(call.inputs[0].shape)
    at = wrap_dim(argument(call, 2, "dim"), rank)
    dims = " ".join(f"d{dim}" + "!" * (dim != at) for dim in range(rank))
    return notation(call, f"{dims} => {dims}; why a norm is taken over all elements of a slice")


def _along(index: int, *dependences: Dependence, why: str, default: object = None) -> Rule:
    """Return the rule of an operator along `dim`; a dim of one element is unchanged.

    Output 1, if there is one, is an index: 0 for the only element.
    """
    several = along(index, "dim", *dependences, default=default, why=why)
    same = linear(0), increasing(0)
    first = linear(0, outputs=(0,)), increasing(0, outputs=(0,))
    alone = {
        outputs: along(index, "dim", *effects, default=default, why=why)
        for outputs, effects in ((1, same), (2, first))
    }

    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        dims = wrap_dims(argument(call, index, "dim", default), len(shape))
        cast = call.inputs[0].dtype != call.outputs[0].dtype
        if cast or any(shape[dim] != 1 for dim in dims):
            return several.notation(call)
        return alone[len(call.outputs)].notation(call)

    return Rule(meaning)


RULES = by_operator(
    {
        "_logcumsumexp cummax cummin cumprod logcumsumexp": _along(1, why=_BEFORE),
        "_unique _unique2 unique_consecutive unique_dim unique_dim_consecutive": opaque(_DISTINCT),
        "cumsum": _along(1, linear(0), why=_BEFORE),
        "kthvalue topk": _along(2, default=-1, why=_RANKED),
        "median.dim nanmedian.dim": _along(1, why=_RANKED),
        "mode": _along(1, default=-1, why="equal elements are counted in all of it"),
        "renorm": Rule(_renorm),
        "sort": _along(1, default=-1, why=_SORTED),
        "sort.stable": _along(KEYWORD_ONLY, default=-1, why=_SORTED),
    }
)
