"""Sharding rules of the operators that our graph passes insert: accumulation and ordering tokens.

    sbp.accumulate(x, how)    over the micro-batches: the sum of how·x; the "maximum", the
                              "minimum"; all of them on a first dim of their own ("stack"); the
                              last one if None
    sbp.after(x, token)       x itself, but not before the token is made

No element of a token is read, so any sharding of it is legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph.primitives import ACCUMULATE, AFTER, ALIAS, STACK
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import (
    Dependence,
    Dims,
    Notation,
    free,
    increasing,
    linear,
    unread,
)
from sbp_core.signatures.patterns import fresh_dims
from sbp_core.signatures.pointwise import broadcasting
from sbp_core.signatures.rule import LocalCall, Rule, Shards


def ordered_after(
    call: OpCall, dims: Dims, made: Dims, *more: Dependence, whole: frozenset[str] = frozenset()
) -> Notation:
    """Return the notation of an operator that waits for an ordering token, linear in its tensor.

    Args:
        call: The tensor is its first tensor argument, the token its second.
        dims: Dims of the tensor.
        made: Dims of the result.
        *more: Its further linearity and monotony.
        whole: Labels that may not be split.
    """
    own = fresh_dims(len(call.inputs[1].shape), "t")
    return Notation(
        inputs=(dims, own),
        outputs=(made,),
        dependences=(linear(0), increasing(0), free(1), *more),
        whole=whole | frozenset(name for (name,) in own),
        why="of a token no part is looked at",
    )


def _after(call: OpCall) -> Notation:
    """`d0 d1, t0! => d0 d1; free 1; unread 1`."""
    dims = fresh_dims(len(call.inputs[0].shape))
    return replace(ordered_after(call, dims, dims, unread(1)), work_flop=0.0)


def _only_first(call: OpCall, _: Shards) -> LocalCall:
    return LocalCall(op=ALIAS, args=call.args[:1])


def _accumulate(call: OpCall) -> Notation:
    """Each rank sums its own shard; sums of maxima are no maxima of sums, nor the other way."""
    if call.args[1] == STACK:
        dims = fresh_dims(len(call.inputs[0].shape))
        return Notation(
            inputs=(dims,),
            outputs=((("m",), *dims),),
            dependences=(linear(0),),
            whole=frozenset({"m"}),
            why="each rank stacks its parts of all micro-batches",
        )
    return broadcasting(call, *(() if isinstance(call.args[1], str) else (linear(0),)))


RULES: Mapping[str, Rule] = {ACCUMULATE: Rule(_accumulate), AFTER: Rule(_after, _only_first)}

#: Operators whose result is in the memory of their argument.
VIEWS = frozenset({AFTER})
