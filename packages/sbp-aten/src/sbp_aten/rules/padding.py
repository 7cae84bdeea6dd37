"""Padding, forward and backward: dims that are not padded are free.

n c x! => n c y!; linear 0; increasing 0      padded: x! and y!
n c y!, n c x! => n c x!; linear 0; unread 1  the gradient
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.signatures import (
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    increasing,
    labels,
    linear,
    unread,
)

_WHY = "a shard would lie elsewhere among the padded elements"


def _dims(rank: int, pad: Sequence[int]) -> tuple[Dims, Dims, frozenset[str]]:
    """Return dims before and after padding, and the labels that stay whole.

    Args:
        rank: Number of dims.
        pad: Elements to add before and behind each dim (negative: to take away), last dim first.
    """
    names = list(labels("d", rank))
    touched = {rank - 1 - at // 2 for at, number in enumerate(pad) if number}
    before = tuple((name,) for name in names)
    after = tuple((f"p{at}",) if at in touched else (name,) for at, name in enumerate(names))
    whole = {name for at in touched for name in (names[at], f"p{at}")}
    return before, after, frozenset(whole)


def _constant(call: OpCall) -> Notation:
    pad = argument(call, 1, "pad")
    before, after, whole = _dims(len(call.inputs[0].shape), pad)
    zero = argument(call, 2, "value", 0) == 0 or max(pad, default=0) <= 0
    return Notation(
        inputs=(before,),
        outputs=(after,),
        dependences=(linear(0), increasing(0)) if zero else (increasing(0),),
        whole=whole,
        why=_WHY,
    )


def _nonempty(rank: int, pad: Sequence[int], whole: frozenset[str]) -> frozenset[str]:
    """Return the labels that kernels need elements of: all but a batch."""
    with_batch = rank == len(pad) // 2 + 2
    return frozenset(list(labels("d", rank))[with_batch:]) - whole


def _repeated(call: OpCall) -> Notation:
    """Padding with elements of the argument itself."""
    rank, padding = len(call.inputs[0].shape), argument(call, 1, "padding")
    before, after, whole = _dims(rank, padding)
    return Notation(
        inputs=(before,),
        outputs=(after,),
        dependences=(linear(0), increasing(0)),
        whole=whole,
        nonempty=_nonempty(rank, padding, whole),
        why=_WHY,
    )


def _repeated_backward(call: OpCall) -> Notation:
    rank, padding = len(call.inputs[0].shape), argument(call, 2, "padding")
    before, after, whole = _dims(rank, padding)
    # Where nothing is repeated, no gradients are added up.
    moved = [increasing(0)] if max(padding) <= 0 else []
    return Notation(
        inputs=(after, before),
        outputs=(before,),
        dependences=(linear(0), unread(1), *moved),
        whole=whole,
        nonempty=_nonempty(rank, padding, whole),
        why=_WHY,
    )


RULES = {
    "aten.constant_pad_nd.default": Rule(_constant),
    **{
        f"aten.{kind}_pad{count}d{suffix}.default": Rule(meaning)
        for kind in ("reflection", "replication")
        for count in (1, 2, 3)
        for suffix, meaning in (("", _repeated), ("_backward", _repeated_backward))
    },
}
