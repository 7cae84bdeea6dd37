"""Schedules that warm up, then do a forward and a backward in turn, then drain.

Each policy is a table row: how many forwards a rank does ahead (`warm_up`), and how many weight
gradients it holds back (`held`). With p ranks, v chunks a rank, m micro-batches, g of them a round,
on rank r:

    policy        warm_up                  held   alive on rank r, in parts of a rank
    gpipe         m                        -      m
    1f1b          p-1-r                    -      p-r
    interleaved   (v-1)g + 2(p-1-r)        -      p + (p-1)/v on rank 0, if g = p
    zero_bubble   (v-1)g + (p-1-r)         r      p, if v = 1
    zb_h1         p-1-r                    r      p
    zb_h2         2(p-1-r)                 2r     2p-1

Each F of the alternation comes before its B, so one more than `warm_up` are alive. What is held
back stays alive: ZB-H1 lets all ranks keep as many as the first has to, and ZB-H2 twice as many.

Source: GPipe (arXiv 1811.06965); PipeDream (SOSP 2019) §3.2; Megatron-LM (arXiv 2104.04473) §2.2;
Zero Bubble (arXiv 2401.10241) §2-3; torch.distributed.pipelining/schedules.py, v2.13.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from sbp_core.pipeline.action import Action, ActionKind

_Place = tuple[int, int]
"""A stage and a micro-batch."""


def gpipe(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """All forwards, then all backwards, the first micro-batch first."""
    return _alternate(*_rounds(p, v, r, m, m), warm_up=m)


def one_forward_one_backward(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """As many forwards ahead as ranks follow; from there on a backward for each forward."""
    return _alternate(*_rounds(p, v, r, m, m), warm_up=p - 1 - r)


def interleaved(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Depth first: g micro-batches through one chunk of all ranks, then through the next chunk."""
    g = round_size(p, m)
    warm_up = (v - 1) * g + 2 * (p - 1 - r)
    return _alternate(*_rounds(p, v, r, m, g), warm_up=warm_up)


def zero_bubble(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """ZB1P: weight gradients wait, so that ranks have work while they wait for others."""
    g = round_size(p, m)
    warm_up = (v - 1) * g + (p - 1 - r)
    return _alternate(*_rounds(p, v, r, m, g), warm_up=warm_up, held=r)


def zb_h1(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """The forwards ahead of 1F1B, and as many activations on all ranks as it has on the first."""
    return _alternate(*_rounds(p, v, r, m, m), warm_up=p - 1 - r, held=r)


def zb_h2(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Twice the forwards ahead, and twice the weight gradients held back."""
    return _alternate(*_rounds(p, v, r, m, m), warm_up=2 * (p - 1 - r), held=2 * r)


def looped_bfs(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Breadth first: all micro-batches through a chunk, then the next; backward the reverse.

    Source: Breadth-First Pipeline Parallelism (arXiv 2211.05953).
    """
    forwards = [(chunk * p + r, k) for chunk in range(v) for k in range(m)]
    for stage, k in forwards:
        yield Action(stage, ActionKind.FORWARD, k)
    for stage, k in reversed(forwards):
        yield Action(stage, ActionKind.BACKWARD, k)


def round_size(p: int, m: int) -> int:
    """Return g: as many rounds of equal size as whole pipelines full of micro-batches."""
    return m // max(1, m // p)


def _rounds(p: int, v: int, r: int, m: int, g: int) -> tuple[list[_Place], list[_Place]]:
    """Return where rank r's forwards and backwards go, g micro-batches a chunk at a time."""
    firsts = range(0, m, g)
    forwards, backwards = (
        [
            (chunk * p + r, k)
            for first in firsts
            for chunk in chunks
            for k in range(first, first + g)
        ]
        for chunks in (range(v), range(v - 1, -1, -1))
    )
    return forwards, backwards


def _alternate(
    forwards: Sequence[_Place],
    backwards: Sequence[_Place],
    *,
    warm_up: int,
    held: int | None = None,
) -> Iterator[Action]:
    """Yield `warm_up` forwards, then F and B in turn, then the backwards that are left.

    With `held`, a backward is an I, and behind all but the first `held` of them follows the W that
    has waited longest; at last come the Ws that are left.
    """
    whole = ActionKind.BACKWARD if held is None else ActionKind.INPUT_GRADIENT
    held = len(backwards) if held is None else held
    ahead, in_turn = forwards[:warm_up], iter(forwards[warm_up:])
    for stage, k in ahead:
        yield Action(stage, ActionKind.FORWARD, k)
    for number, (stage, k) in enumerate(backwards):
        for forward, other in islice(in_turn, 1):
            yield Action(forward, ActionKind.FORWARD, other)
        yield Action(stage, whole, k)
        if number >= held:
            waited, other = backwards[number - held]
            yield Action(waited, ActionKind.WEIGHT_GRADIENT, other)
    if whole is ActionKind.INPUT_GRADIENT:
        for stage, k in backwards[max(0, len(backwards) - held) :]:
            yield Action(stage, ActionKind.WEIGHT_GRADIENT, k)
