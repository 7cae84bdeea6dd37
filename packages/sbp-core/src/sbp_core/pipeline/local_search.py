"""Orders improved by small changes: neighbours on the critical path change places.

The makespan is the length of a path on which each action begins when the one before it ends. A
shorter one needs another order somewhere on it: so on ranks where two actions follow each other on
the path, the second goes first, or goes ahead of several. Sidesteps to orders as long are taken,
but not back to one that was there.

Source: van Laarhoven, Aarts, Lenstra, Job Shop Scheduling by Simulated Annealing (1992) §3 for the
neighbourhood; Glover, Tabu Search (1989).

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sbp_core.pipeline.precedence import Precedence

_MOST_FIRINGS = 600_000
"""So many actions all orders that are tried may have together, of each start: a second or so."""
_FARTHEST = 4
"""An action goes ahead of so many at once, at most."""


def improve(
    work: Precedence, orders: Sequence[Sequence[int]], limits: Sequence[int], least: int
) -> list[list[int]]:
    """Return orders with a makespan at most that of the ones given.

    Args:
        work: What the actions take and need.
        orders: Where the search begins: the numbers of each rank's actions, none of them joined.
        limits: For each rank the most activations of chunks alive.
        least: No order takes less, in units of `work`.
    """
    best = now = [list(order) for order in orders]
    ends = work.ends(now)
    assert ends is not None, "a search begins with an order that runs"
    shortest = max(ends)
    seen = {_key(now)}
    for _ in range(_MOST_FIRINGS // (len(ends) * 12)):
        if shortest <= least:
            break
        nearest: tuple[int, int, list[list[int]], list[int]] | None = None
        for changed in _neighbours(work, now, ends):
            rank = changed[0]
            if _key(changed[1]) in seen or not _fits(work, changed[1][rank], limits[rank]):
                continue
            times = work.ends(changed[1])
            if times is None:
                continue
            score = (max(times), sum(times[order[-1]] for order in changed[1]))
            if nearest is None or score < nearest[:2]:
                nearest = (*score, changed[1], times)
            if score[0] < shortest:
                break
        if nearest is None:
            break
        length, _, now, ends = nearest
        seen.add(_key(now))
        if length < shortest:
            best, shortest = now, length
    return best


def _key(orders: Sequence[Sequence[int]]) -> int:
    return hash(tuple(map(tuple, orders)))


def _neighbours(
    work: Precedence, orders: Sequence[list[int]], ends: Sequence[int]
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield a rank that changes, and the orders after that."""
    at = {number: place for order in orders for place, number in enumerate(order)}
    number = max(range(len(ends)), key=lambda one: ends[one])
    while True:
        rank, place = work.rank[number], at[number]
        start = ends[number] - work.duration[number]
        order = orders[rank]
        behind = order[place - 1] if place else None
        if behind is not None and ends[behind] == start:
            for ahead in range(1, min(_FARTHEST, place) + 1):
                changed = [*order]
                changed.insert(place - ahead, changed.pop(place))
                yield rank, [changed if one is order else one for one in orders]
            following = behind
        else:
            waited = [other for other, lag in work.before[number] if ends[other] + lag == start]
            if not waited:
                return
            following = waited[0]
        number = following


def _fits(work: Precedence, order: Sequence[int], limit: int) -> bool:
    alive = 0
    for number in order:
        part = number // work.num_micro_batches % 3
        alive += (part == 0) - (part == 2)
        if alive > limit:
            return False
    return True
