"""Give each node of a choice problem a strategy without forbidden pairs, whatever the cost.

`large_search` calls this if its other methods leave forbidden pairs. Each node has a domain: its
remaining strategies, as the bits of an int. A strategy is ruled out if no remaining strategy of
some neighbour allows it (*arc consistency*), and so on for its neighbours:

    try 1 = a  -->  2: a b c   becomes  b c  -->  3: c d  becomes  d  -->  a domain is empty:
                                                                           1 is not a

The next node to try has the smallest domain, in relation to how often its edges ended a try. After
some failures the search restarts, with these counts of the edges.

Source: Mackworth, "Consistency in networks of relations", Artificial Intelligence 8 (1977) (AC-3);
Boussemart et al., "Boosting systematic search by weighting constraints", ECAI 2004 (the order).
"""

from __future__ import annotations

import time
from math import inf

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints

#: Failures before a restart, and the factor by which they grow each time.
_FAILURES = 100
_MORE_FAILURES = 1.5


def consistent(compact: Compact, wanted: Floats, deadline: float) -> Ints | None:
    """Return an assignment without forbidden pairs; None if there is none, or no time.

    Args:
        compact: The problem; its memory is ignored.
        wanted: For each column a value; strategies with low values are tried first.
        deadline: Time of `time.monotonic` at which the search ends, in s.
    """
    return _Search(compact, wanted, deadline).run()


class _Search:
    def __init__(self, compact: Compact, wanted: Floats, deadline: float) -> None:
        self.compact = compact
        self.deadline = deadline
        count = compact.num_nodes
        first = compact.first.tolist()
        # For each node its neighbours, the edge, and the neighbour's strategies that each allows.
        self.around: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(count)]
        for number, ((u, v), table) in enumerate(zip(compact.edges, compact.tables, strict=True)):
            allowed = table < inf
            if not allowed.all():
                for node, other, rows in ((u, v, allowed), (v, u, allowed.T)):
                    # The indices of True as the bits of an int.
                    bits = [sum(1 << int(place) for place in np.flatnonzero(row)) for row in rows]
                    self.around[node].append((other, number, bits))
        self.order = [np.argsort(wanted[first[n] : first[n + 1]]).tolist() for n in range(count)]
        self.weight = [1] * len(compact.edges)
        self.domain = [(1 << int(size)) - 1 for size in compact.sizes]
        self.trail: list[tuple[int, int]] = []

    def run(self) -> Ints | None:
        """Try until a failure at the root, or until the time is up."""
        if not self._propagate(range(len(self.domain))):
            return None
        limit = float(_FAILURES)
        self.trail.clear()
        while time.monotonic() < self.deadline:
            found = self._descend(limit)
            if found is not None:
                values = np.array([domain.bit_length() - 1 for domain in self.domain])
                return values if found else None
            limit *= _MORE_FAILURES
            self._undo(0)
        return None

    def _descend(self, limit: float) -> bool | None:
        """Try; return True for an assignment, False if there is none, None after the limit."""
        open_ = [n for n, domain in enumerate(self.domain) if domain & (domain - 1)]
        tries: list[tuple[int, int, int]] = []  # node, strategy, earlier length of the trail
        failures = 0
        while True:
            node = self._next(open_)
            if node is None:
                return True
            strategy = next(int(s) for s in self.order[node] if self.domain[node] >> s & 1)
            tries.append((node, strategy, len(self.trail)))
            self._set(node, 1 << strategy)
            while not self._propagate([node]):
                # The last try is ruled out, which may rule out earlier tries.
                failures += 1
                if not tries:
                    return False
                node, strategy, length = tries.pop()
                self._undo(length)
                self._set(node, self.domain[node] & ~(1 << strategy))
            if failures > limit or time.monotonic() >= self.deadline:
                return None

    def _next(self, nodes: list[int]) -> int | None:
        best, least = None, inf
        for node in nodes:
            size = self.domain[node].bit_count()
            if size > 1:
                weight = sum(self.weight[number] for _, number, _ in self.around[node])
                if size / (weight + 1) < least:
                    best, least = node, size / (weight + 1)
        return best

    def _set(self, node: int, domain: int) -> None:
        self.trail.append((node, self.domain[node]))
        self.domain[node] = domain

    def _undo(self, length: int) -> None:
        while len(self.trail) > length:
            node, domain = self.trail.pop()
            self.domain[node] = domain

    def _propagate(self, changed: list[int] | range) -> bool:
        """Rule out strategies that no neighbour allows; return whether no domain is empty."""
        if any(not self.domain[node] for node in changed):
            return False
        queue = dict.fromkeys(changed)
        while queue:
            node = next(iter(queue))
            del queue[node]
            own = self.domain[node]
            for other, number, masks in self.around[node]:
                union, rest = 0, own
                while rest:
                    low = rest & -rest
                    union |= masks[low.bit_length() - 1]
                    rest ^= low
                domain = self.domain[other]
                if domain & ~union:
                    self._set(other, domain & union)
                    if not domain & union:
                        self.weight[number] += 1
                        return False
                    queue[other] = None
        return True
