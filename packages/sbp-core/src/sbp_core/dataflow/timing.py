"""Timing of dataflow networks: earliest starts of the firings of an iteration, period and latency.

`EarliestStarts` keeps the times up to date while waits change:

    place         0    1    2    3    4          firings in an order in which they can happen
    firing        a    b    c    d    e
    a -> d, b -> e                               waits within the iteration

    e -> b comes   b waits for e, which is placed after it: the successors of b up to the place of e
                   go after the predecessors of e from the place of b on. If b leads to e: a cycle.

A search for quotas or orders changes a few waits and asks for the end, thousands of times. So only
firings between the two ends of a new wait are reordered, and only firings whose times change are
timed again. The result equals that of timing the network from scratch, to the last bit: a firing
begins at the latest end of the firings that it waits for, in whatever way that was found.

Source: the order as in D. Pearce and P. Kelly, "A dynamic topological sort algorithm for directed
acyclic graphs", ACM JEA 11, 2006.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sbp_core.dataflow.actor_network import Network, Seconds
from sbp_core.dataflow.cycle_ratio import maximum_cycle_ratio
from sbp_core.dataflow.expansion import Dependency, Expansion, expand
from sbp_core.dataflow.liveness import check_live, topological

#: A firing waits for another one: the number of the other, and its own.
Wait = tuple[int, int]


class EarliestStarts:
    """The earliest time at which each firing of one iteration begins.

    Args:
        expansion: The expansion whose waits within an iteration count. Equal waits count
            separately.

    Attributes:
        start_s: The begin of each firing, in seconds.
        is_live: Whether there is no cycle. If there is one, all other attributes are invalid.
    """

    def __init__(self, expansion: Expansion) -> None:
        self._duration_s = expansion.duration_s
        num = len(self._duration_s)
        self._before: list[list[int]] = [[] for _ in range(num)]
        self._after: list[list[int]] = [[] for _ in range(num)]
        waits = zip(expansion.on, expansion.waiting, expansion.delay, strict=True)
        for on, waiting, delay in waits:
            if not delay:
                self._insert((on, waiting))
        order, _ = topological(expansion)
        self.is_live = len(order) == num
        self.start_s: list[Seconds] = [0] * num
        self._place = [0] * num
        for place, firing in enumerate(order):
            self._place[firing] = place
            self.start_s[firing] = self._earliest_s(firing)

    @property
    def end_s(self) -> Seconds:
        """The end of the last firing, in seconds."""
        return max(map(operator.add, self.start_s, self._duration_s), default=0)

    def change(self, removed: Sequence[Wait], added: Sequence[Wait]) -> bool:
        """Remove some waits and add others; return whether there is no cycle then.

        If there is one, nothing is changed.
        """
        for wait in removed:
            self._remove(wait)
        for number, wait in enumerate(added):
            if not self._place_behind(*wait):
                for undone in added[:number]:
                    self._remove(undone)
                for again in removed:
                    self._place_behind(*again)
                    self._insert(again)
                return False
            self._insert(wait)
        self._retime({waiting for _, waiting in (*removed, *added)})
        return True

    def _remove(self, wait: Wait) -> None:
        on, waiting = wait
        self._before[waiting].remove(on)
        self._after[on].remove(waiting)

    def _insert(self, wait: Wait) -> None:
        on, waiting = wait
        self._before[waiting].append(on)
        self._after[on].append(waiting)

    def _place_behind(self, on: int, waiting: int) -> bool:
        """Reorder firings so that one comes after another; return whether that is possible."""
        place = self._place
        if place[on] < place[waiting]:
            return True
        behind = _reached(waiting, self._after, lambda firing: place[firing] <= place[on])
        if on in behind:
            return False
        ahead = _reached(on, self._before, lambda firing: place[firing] >= place[waiting])
        moved = [*sorted(ahead, key=place.__getitem__), *sorted(behind, key=place.__getitem__)]
        for firing, free in zip(moved, sorted(place[firing] for firing in moved), strict=True):
            place[firing] = free
        return True

    def _retime(self, firings: Iterable[int]) -> None:
        """Recompute the times of some firings and of all that depend on them, in order.

        A firing is visited after all firings that it waits for, so each is timed once.
        """
        due = [(self._place[firing], firing) for firing in firings]
        heapify(due)
        known = {firing for _, firing in due}
        while due:
            _, firing = heappop(due)
            start_s = self._earliest_s(firing)
            if start_s != self.start_s[firing]:
                self.start_s[firing] = start_s
                for other in self._after[firing]:
                    if other not in known:
                        known.add(other)
                        heappush(due, (self._place[other], other))

    def _earliest_s(self, firing: int) -> Seconds:
        return max(
            (self.start_s[on] + self._duration_s[on] for on in self._before[firing]), default=0
        )


def _reached(
    start: int, neighbours: Sequence[Sequence[int]], is_between: Callable[[int], bool]
) -> set[int]:
    """Return the firings that are reachable from a firing over firings between two places."""
    found, todo = {start}, [start]
    while todo:
        for other in neighbours[todo.pop()]:
            if other not in found and is_between(other):
                found.add(other)
                todo.append(other)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalCycle:
    """The cycle of waits that limits the rate of iterations.

    Args:
        period_s: Time from one iteration to the next, in seconds; exact if no duration is a float.
        waits: Each for the firing that waits in the next one, the last for the first; empty if
            nothing prevents all iterations from running at once.
    """

    period_s: Seconds
    waits: tuple[Dependency, ...]


def critical_cycle(network: Network) -> CriticalCycle:
    """Return the period of a network, and the cycle that causes it.

        theorem    the period of an iteration is the maximum cycle ratio of the homogeneous network:
                   the durations on a cycle of waits, divided by the iterations that it spans
                   (Reiter 1968).

    If some part of a network may run ahead of another for ever, over an edge without a quota, its
    period is that of the slowest part.

    Raises:
        SbpValueError: it is not live, or its rates are not consistent.
    """
    expansion = expand(network)
    start_s = _starts(expansion).start_s
    # From the waiting firing to the firing waited for, in the order of messages.
    edges = list(zip(expansion.waiting, expansion.on, expansion.delay, strict=True))
    weights = [expansion.duration_s[node] for node in expansion.on]
    found = maximum_cycle_ratio(edges, weights, start_s)
    if found is None:
        return CriticalCycle(period_s=0, waits=())
    return CriticalCycle(period_s=found[0], waits=expansion.dependencies(found[1]))


def latency(network: Network) -> Seconds:
    """Return the time of one iteration by itself, in seconds: its longest path of waits.

    Raises:
        SbpValueError: the network is not live, or its rates are not consistent.
    """
    return _starts(expand(network)).end_s


def _starts(expansion: Expansion) -> EarliestStarts:
    """Return the begin of each firing of the first iteration: the longest path of waits to it."""
    found = EarliestStarts(expansion)
    if not found.is_live:
        check_live(expansion.network)
    return found
