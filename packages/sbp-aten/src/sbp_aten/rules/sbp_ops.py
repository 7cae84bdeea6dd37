"""Sharding rules of our own operators (namespace `sbp`) that the passes over ATen graphs write.

    sbp.piece(x, token, dim, index, count, settled)
        the elements index, index + count, ... of a dim, but not before the token exists
    sbp.mm_as(a, b, dtype), sbp.bmm_as             products, in a wider dtype
    sbp.batch_norm_sums(x)                         sums of x and of x^2 by channel, [2, C]

A token may have any SBP. If it must be settled, it may not be partial, so that waiting for it
includes its reduction.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from dataclasses import replace

from sbp_aten.rules.formula import stated
from sbp_core.signatures import (
    Dims,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    fresh_dims,
    ordered_after,
    unread,
)


def _piece(call: OpCall) -> Notation:
    """`(k s!) d1, t0! => k d1; free 1`: equal shards, divisible by `count`, are cut locally."""
    _, _, dim, _, count, settled = call.args
    made = fresh_dims(len(call.inputs[0].shape))
    whole: Dims = (*made[:dim], (*made[dim], "s"), *made[dim + 1 :])
    found = ordered_after(
        call, whole, made, *(() if settled else (unread(1),)), whole=frozenset({"s"})
    )
    return replace(found, sizes=(("s", count),), why="it is the distance of two elements")


def _own_piece(call: OpCall, shards: Shards) -> LocalProgram:
    x, _, dim, index, count, _ = call.args
    builder = LocalProgramBuilder()
    stop = shards.inputs[0][dim][1] - shards.inputs[0][dim][0]
    return builder.program(builder("aten.slice_copy.Tensor", x, dim, index, stop, count))


#: Sums over split batch and positions are partial sums.
_BATCH_NORM_SUMS = "n c s* => k! c; size k 2; why sums and sums of squares stay together"

RULES = {
    "sbp.batch_norm_sums.default": stated(_BATCH_NORM_SUMS),
    "sbp.bmm_as.default": Rule("n i k, n k j -> n i j"),
    "sbp.mm_as.default": Rule("i k, k j -> i j"),
    "sbp.piece": Rule(_piece, _own_piece),
}
