"""The knapsack of OSDP: which parameters to shard so that a step is fastest and fits.

    minimise    sum_i t_i(p_i)                              p_i in {DP, ZDP}         [s]
    such that   sum_i m_i(p_i) + F + max_{i: p_i = ZDP} x_i <= L                     [B]

t_i is the communication time of parameter i, m_i its model states on one rank, x_i the transient of
a sharded one (its gathered copy and its gradient), F what does not depend on the choice, L the
limit. Knows no graph and no cluster.

Solved exactly, bytes are never rounded. The transient is a maximum, so items are taken up in the
order of x_i: once all with x_i <= τ have been, the choices among them are a knapsack with the
capacity L - F - τ. One pass keeps the Pareto frontier of (bytes saved, seconds added), against
all-DP; equal items count together, so a class of k equal items has k + 1 choices. Time is
O(sum over classes of frontier * (k + 1)); the frontier has at most product of (k + 1) entries, and
no more than the distinct savings below what is needed.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3 (the model; the search there is depth-first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import TypeAlias

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KnapsackItem:
    """One parameter, as the knapsack sees it: bytes on one rank, seconds of one step.

    Args:
        transient_bytes: Held while it is used, if sharded.
        dp_bytes: Model states if replicated.
        zdp_bytes: Model states if sharded.
        dp_s: Communication if replicated.
        zdp_s: Communication if sharded.
    """

    transient_bytes: int
    dp_bytes: int
    zdp_bytes: int
    dp_s: float
    zdp_s: float

    def __post_init__(self) -> None:
        if min(self.transient_bytes, self.dp_bytes, self.zdp_bytes, self.dp_s, self.zdp_s) < 0:
            raise SbpValueError(f"{self} is negative", accepted="bytes and seconds >= 0")
        if self.zdp_bytes > self.dp_bytes:
            raise SbpValueError(f"{self} grows by sharding", accepted="zdp_bytes <= dp_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSolution:
    """What was chosen.

    Args:
        sharded: For each item, whether it is sharded.
        seconds: Sum of the communication times.
        memory_bytes: Memory of one rank, F included.
        transient_bytes: The largest transient of a sharded item.
    """

    sharded: tuple[bool, ...]
    seconds: float
    memory_bytes: int
    transient_bytes: int


#: How many of each class so far: (this class's count, the rest).
_Counts: TypeAlias = "tuple[int, _Counts] | None"

#: (bytes saved, seconds added, counts)
_Point = tuple[int, float, "_Counts"]


def evaluate(
    items: Sequence[KnapsackItem], sharded: Sequence[bool], fixed_bytes: int = 0
) -> KnapsackSolution:
    """Return time and memory of a choice."""
    pairs = list(zip(items, sharded, strict=True))
    transient = max((item.transient_bytes for item, yes in pairs if yes), default=0)
    states = sum(item.zdp_bytes if yes else item.dp_bytes for item, yes in pairs)
    return KnapsackSolution(
        sharded=tuple(sharded),
        seconds=sum(item.zdp_s if yes else item.dp_s for item, yes in pairs),
        memory_bytes=fixed_bytes + states + transient,
        transient_bytes=transient,
    )


def choose(
    items: Sequence[KnapsackItem], limit_bytes: float, fixed_bytes: int = 0
) -> KnapsackSolution | None:
    """Return the fastest choice that fits; among equals the one with the least memory.

    Args:
        items: The parameters.
        limit_bytes: L.
        fixed_bytes: F.

    Returns:
        The choice; None if nothing fits.
    """
    order = sorted(range(len(items)), key=lambda index: (items[index], index))
    classes = [list(same) for _, same in groupby(order, key=lambda index: items[index])]
    kinds = [items[members[0]] for members in classes]
    sizes = [len(members) for members in classes]
    all_dp = evaluate(items, [False] * len(items), fixed_bytes).memory_bytes
    counts = _search(kinds, sizes, all_dp, limit_bytes)
    if counts is None:
        return None
    sharded = [False] * len(items)
    for members, count in zip(classes, counts, strict=True):
        for index in members[:count]:
            sharded[index] = True
    return evaluate(items, sharded, fixed_bytes)


def _search(
    kinds: Sequence[KnapsackItem], sizes: Sequence[int], all_dp: int, limit_bytes: float
) -> list[int] | None:
    """Return how many of each class to shard; None if nothing fits.

    A point is dropped when even the best ratio of seconds to bytes among the classes to come could
    not bring it to fit in less time than a greedy choice takes.
    """
    needs = [all_dp + kind.transient_bytes - limit_bytes for kind in kinds]
    bound = _greedy_seconds(kinds, sizes, needs)
    ratios = [_ratio(kind) for kind in kinds]
    best = ((0.0, all_dp), [0] * len(kinds)) if all_dp <= limit_bytes else None
    frontier: list[_Point] = [(0, 0.0, None)]
    for at, (kind, size, needed) in enumerate(zip(kinds, sizes, needs, strict=True)):
        frontier = _pareto(_extended(frontier, kind, size), needs[-1])
        for saved, added, counts in frontier:
            if saved >= needed:  # later points of the frontier save more and cost more
                key = (added, all_dp + kind.transient_bytes - saved)
                if best is None or key < best[0]:
                    best = key, _unlink(counts, len(kinds))
                break
        ratio = min(ratios[at + 1 :], default=inf)
        frontier = [
            point
            for point in frontier
            if point[0] >= needed or point[1] + (needed - point[0]) * ratio <= bound
        ]
    return best[1] if best else None


def _ratio(kind: KnapsackItem) -> float:
    """Return the seconds that sharding one item adds for each byte that it saves."""
    saves = kind.dp_bytes - kind.zdp_bytes
    return max(0.0, kind.zdp_s - kind.dp_s) / saves if saves else inf


def _greedy_seconds(
    kinds: Sequence[KnapsackItem], sizes: Sequence[int], needs: Sequence[float]
) -> float:
    """Return the seconds that some fitting choice adds, rounded up; infinite if none is found."""
    found = inf
    for last, needed in enumerate(needs):
        saved, added = 0, 0.0
        for at in sorted(range(last + 1), key=lambda index: _ratio(kinds[index])):
            for _ in range(sizes[at]):
                if saved < needed:
                    saved += kinds[at].dp_bytes - kinds[at].zdp_bytes
                    added += max(0.0, kinds[at].zdp_s - kinds[at].dp_s)
        if saved >= needed:
            found = min(found, added)
    return found * (1 + 1e-9)  # sums in another order may differ in their last digits


def _extended(frontier: Sequence[_Point], item: KnapsackItem, num: int) -> Iterable[_Point]:
    """Yield every point with 0 .. num items of one class sharded besides."""
    saves, adds = item.dp_bytes - item.zdp_bytes, item.zdp_s - item.dp_s
    for saved, added, counts in frontier:
        for count in range(num + 1):
            yield saved + count * saves, added + count * adds, (count, counts)


def _pareto(points: Iterable[_Point], most_needed: float) -> list[_Point]:
    """Keep what no other point beats in both; saving more than is ever needed is worth nothing.

    Returns:
        Points with rising savings and rising seconds.
    """
    kept: list[_Point] = []
    enough = False
    for point in sorted(points, key=lambda entry: (entry[1], -entry[0])):
        if enough or (kept and point[0] <= kept[-1][0]):
            continue
        kept.append(point)
        enough = point[0] >= most_needed
    return kept


def _unlink(counts: _Counts, num: int) -> list[int]:
    """Return the counts of the first classes, and none of the others."""
    found: list[int] = []
    while counts is not None:
        count, counts = counts
        found.append(count)
    return [*reversed(found), *[0] * (num - len(found))]
