"""Our own operators, but for those that draw random numbers (`random`).

    sbp.accumulate(x, how)                         over the micro-batches: the sum of how·x; the
                                                   "maximum", the "minimum"; the last one if None
    sbp.after(x, token)                            x itself, but not before the token is made
    sbp.piece(x, token, dim, index, count, settled)
        the elements index, index + count, ... of a dim, but not before the token is made
    sbp.mm_as(a, b, dtype), sbp.bmm_as             products, in a wider dtype

A token is not looked at. It may lie as it likes; if it must be settled it may not be partial, so
that whoever waits for it waits for its reduction as well.
"""

from __future__ import annotations

from dataclasses import replace

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
from sbp_core.signatures.rule import Draft, LocalCall, LocalProgram, Rule, Shards
from sbp_core.signatures.patterns import each
from sbp_aten.rules.pointwise import broadcasting


def _waiting(
    call: OpCall, dims: Dims, made: Dims, *more: Dependence, whole: frozenset[str] = frozenset()
) -> Notation:
    """Return the notation of an operator on a tensor and a token, linear in the former."""
    own = each(len(call.inputs[1].shape), "t")
    return Notation(
        inputs=(dims, own),
        outputs=(made,),
        dependences=(linear(0), increasing(0), free(1), *more),
        whole=whole | frozenset(name for (name,) in own),
        why="of a token no part is looked at",
    )


def _after(call: OpCall) -> Notation:
    """`d0 d1, t0! => d0 d1; free 1; unread 1`."""
    dims = each(len(call.inputs[0].shape))
    return replace(_waiting(call, dims, dims, unread(1)), work_flop=0.0)


def _only_first(call: OpCall, _: Shards) -> LocalCall:
    return LocalCall(op="aten.alias.default", args=call.args[:1])


def _piece(call: OpCall) -> Notation:
    """`(k s!) d1, t0! => k d1; free 1`: equal shards that `count` divides keep their own."""
    _, _, dim, _, count, settled = call.args
    made = each(len(call.inputs[0].shape))
    whole: Dims = (*made[:dim], (*made[dim], "s"), *made[dim + 1 :])
    found = _waiting(call, whole, made, *(() if settled else (unread(1),)), whole=frozenset({"s"}))
    return replace(found, sizes=(("s", count),), why="it is the distance of two elements")


def _own_piece(call: OpCall, shards: Shards) -> LocalProgram:
    x, _, dim, index, count, _ = call.args
    draft = Draft()
    stop = shards.inputs[0][dim][1] - shards.inputs[0][dim][0]
    return draft.program(draft("aten.slice_copy.Tensor", x, dim, index, stop, count))


def _accumulate(call: OpCall) -> Notation:
    """Each rank sums what it holds; sums of maxima are no maxima of sums, nor the other way."""
    found = () if isinstance(call.args[1], str) else (linear(0),)
    return replace(broadcasting(call), dependences=found)


RULES = {
    "sbp.accumulate": Rule(_accumulate),
    "sbp.after": Rule(_after, _only_first),
    "sbp.bmm_as.default": Rule("n i k, n k j -> n i j"),
    "sbp.mm_as.default": Rule("i k, k j -> i j"),
    "sbp.piece": Rule(_piece, _own_piece),
}
