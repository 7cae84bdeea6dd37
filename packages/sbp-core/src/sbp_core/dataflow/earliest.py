"""When the firings of an iteration begin at the earliest, kept up to date while waits change.

    place         0    1    2    3    4          firings in an order in which they can happen
    firing        a    b    c    d    e
    a -> d, b -> e                               waits within the iteration

    e -> b comes   b waits for e, which is placed behind it: what follows b up to the place of e
                   goes behind what e follows from the place of b on. If b leads to e: a cycle.

A search for quotas or orders changes a few waits and asks for the end, thousands of times. So only
firings between the two ends of a new wait are placed anew, and only those are timed anew whose
times change. What comes out is that of a network that is timed from scratch, to the last bit: a
firing begins at the latest end of those that it waits for, whichever way that was found.

Source: the order as in D. Pearce and P. Kelly, "A dynamic topological sort algorithm for directed
acyclic graphs", ACM JEA 11, 2006.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from sbp_core.dataflow.expansion import Expansion
from sbp_core.dataflow.network import Seconds

#: A firing waits for another one: the number of the other, and its own.
Wait = tuple[int, int]


class EarliestStarts:
    """The earliest time at which each firing of one iteration begins.

    Args:
        expansion: Of which the waits within an iteration count. One that is there twice has to be
            removed twice.

    Attributes:
        start_s: When each firing begins, in seconds.
        is_live: Whether there is no cycle. If there is one, nothing else holds.
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
        missing = list(map(len, self._before))
        order = [firing for firing in range(num) if not missing[firing]]
        for firing in order:
            for other in self._after[firing]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        self.is_live = len(order) == num
        self.start_s: list[Seconds] = [0] * num
        self._place = [0] * num
        for place, firing in enumerate(order):
            self._place[firing] = place
            self.start_s[firing] = self._earliest_s(firing)

    @property
    def end_s(self) -> Seconds:
        """When the last firing is over, in seconds."""
        return max(map(operator.add, self.start_s, self._duration_s), default=0)

    def change(self, removed: Sequence[Wait], added: Sequence[Wait]) -> bool:
        """Take some waits away and put others there; return whether there is no cycle then.

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
        """Place firings so that one comes behind another; return whether that is possible."""
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
        """Time some firings anew, and all whose times change with theirs, in the order of places.

        None is looked at before all that it waits for, so each is timed once.
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
    """Return what can be reached from a firing over those between two places."""
    found, todo = {start}, [start]
    while todo:
        for other in neighbours[todo.pop()]:
            if other not in found and is_between(other):
                found.add(other)
                todo.append(other)
    return found
