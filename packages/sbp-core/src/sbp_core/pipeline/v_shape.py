"""Schedules of two chunks a rank in the shape of a V: rank r holds the stages r and 2p-1-r.

So the first rank has the first stage and the last one, the forward's way back passes the ranks in
reverse, and the last rank's second chunk follows its first without a transfer:

    stage   0   1   2   3   4   5   6   7      (p = 4)
    rank    0   1   2   3   3   2   1   0

Below, `down` is the chunk with stage r, and `up` the one with stage 2p-1-r.

Stability: internal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from sbp_core.pipeline.action import Action, ActionKind


class _Chunk:
    """A chunk that counts, so that its n-th F, I (or B) or W is that of micro-batch n."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: Counter[ActionKind] = Counter()

    def __call__(self, letters: str) -> Iterator[Action]:
        for letter in letters:
            kind = ActionKind(letter)
            counted = ActionKind.INPUT_GRADIENT if kind is ActionKind.BACKWARD else kind
            yield Action(self.stage, kind, self.done[counted])
            self.done[counted] += 1


def zbv(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """ZB-V: as ZB-H2, with the memory of 1F1B; idle only at the ends, if F = I = W.

    A pipeline of fewer than 2p-1 micro-batches does what that of 2p-1 would, without the others.

    Source: Zero Bubble (arXiv 2401.10241) §6; torch's `ScheduleZBVZeroBubble`.
    """
    return (action for action in _filled_zbv(p, max(m, 2 * p - 1), r) if action.micro_batch < m)


def _filled_zbv(p: int, m: int, r: int) -> Iterator[Action]:
    down, up = _Chunk(r), _Chunk(2 * p - 1 - r)
    yield from down("F" * (2 * (p - r) - 1))
    for _ in range(r):
        yield from up("F")
        yield from down("F")
    for _ in range(p - r):
        yield from up("FIW")
    # The stable phase: each rank does all of its work on one micro-batch of each chunk.
    while up.done[ActionKind.FORWARD] < m:
        if down.done[ActionKind.FORWARD] < m:
            yield from down("F")
        yield from down("IW")
        yield from up("FIW")
    for _ in range(r):
        yield from down("I")
        yield from up("I")
    yield from down("IW" * (p - r))
    yield from up("W" * r)
    yield from down("W" * r)


def dualpipev(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """DualPipe cut in half: a forward of one chunk beside a backward of the other.

    The F stands directly before the B here; `overlapped` says which run at once, so that one
    computes while the other communicates.

    Source: DeepSeek-V3 (arXiv 2412.19437) §3.2; github.com/deepseek-ai/DualPipe, dualpipev.py;
    torch's `ScheduleDualPipeV`.
    """
    down, up = _Chunk(r), _Chunk(2 * p - 1 - r)
    after = p - 1 - r
    waiting: deque[Action] = deque()
    yield from down("F" * (2 * after))
    for _ in range(r + 1):
        yield from down("F")
        yield from up("F")
    for _ in range(after):
        yield from up("IWF")
    for _ in range(m - 2 * p + r + 1):
        yield from down("F")
        yield from up("BF")
        yield from down("B")
    for _ in range(after):
        yield from up("BF")
        yield from down("B")
    # Of the last backwards that alternate, the second half is split, to fill the drain with W.
    for number in range(2 * (r + 1)):
        backward = list((down if number % 2 else up)("I" if number > r else "B"))
        waiting += backward if number > r else ()
        yield from backward
    for _ in range(after):
        yield _weights_of(waiting.popleft())
        waiting += (backward := list(down("I")))
        yield from backward
    yield from map(_weights_of, waiting)


def overlapped(p: int, orders: Iterable[Sequence[Action]]) -> frozenset[Action]:
    """Return the forwards of DualPipeV that run at once with the backward behind them.

    The very first backward, on the last rank, runs alone: others wait for it.
    """
    first = Action(p, ActionKind.BACKWARD, 0)
    return frozenset(
        forward
        for order in orders
        for forward, backward in pairwise(order)
        if forward.kind is ActionKind.FORWARD
        and backward.kind is ActionKind.BACKWARD
        and backward != first
    )


def _weights_of(backward: Action) -> Action:
    return Action(backward.stage, ActionKind.WEIGHT_GRADIENT, backward.micro_batch)
