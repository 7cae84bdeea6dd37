"""Operators that run along one dim: running sums, sorting, order statistics; the others are free.

    cumsum(dim=1)     d0 t0_1! d2 => d0 t1_1! d2; linear 0
    topk(3, dim=1)    d0 t0_1! => d0 t1_1!, d0 t2_1!

Also those that look for distinct elements, which run whole.
"""

from __future__ import annotations

from sbp_core.signatures import (
    KEYWORD_ONLY,
    Dependence,
    Notation,
    OpCall,
    Rule,
    along,
    argument,
    fresh_dims,
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
    dims = fresh_dims(len(call.inputs[0].shape))
    at = wrap_dim(argument(call, 2, "dim"), len(dims))
    return Notation(
        inputs=(dims,),
        outputs=(dims,),
        whole=frozenset(name for index, (name,) in enumerate(dims) if index != at),
        why="the norm of a slice is one of all its elements",
    )


def _along(index: int, *dependences: Dependence, why: str, default: object = None) -> Rule:
    """Return the rule of an operator along `dim`, which leaves a dim of one element as it is.

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


RULES = {
    "aten._logcumsumexp.default": _along(1, why=_BEFORE),
    "aten._unique.default": opaque(_DISTINCT),
    "aten._unique2.default": opaque(_DISTINCT),
    "aten.cummax.default": _along(1, why=_BEFORE),
    "aten.cummin.default": _along(1, why=_BEFORE),
    "aten.cumprod.default": _along(1, why=_BEFORE),
    "aten.cumsum.default": _along(1, linear(0), why=_BEFORE),
    "aten.kthvalue.default": _along(2, default=-1, why=_RANKED),
    "aten.logcumsumexp.default": _along(1, why=_BEFORE),
    "aten.median.dim": _along(1, why=_RANKED),
    "aten.mode.default": _along(1, default=-1, why="equal elements are counted in all of it"),
    "aten.nanmedian.dim": _along(1, why=_RANKED),
    "aten.renorm.default": Rule(_renorm),
    "aten.sort.default": _along(1, default=-1, why=_SORTED),
    "aten.sort.stable": _along(KEYWORD_ONLY, default=-1, why=_SORTED),
    "aten.topk.default": _along(2, default=-1, why=_RANKED),
    "aten.unique_consecutive.default": opaque(_DISTINCT),
    "aten.unique_dim.default": opaque(_DISTINCT),
    "aten.unique_dim_consecutive.default": opaque(_DISTINCT),
}
