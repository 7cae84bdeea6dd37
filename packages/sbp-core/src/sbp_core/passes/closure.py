"""Find the cheapest set of items if taking one may require others; `budget` calls it.

    minimise    sum over taken x of weight(x)
    subject to  y is taken if x is taken and requires y; required items are taken

This is the project-selection problem, solved exactly by a minimum cut of a network. The source side
of the cut is the set of taken items:

    source -> x     -weight(x)   for weight(x) < 0        x -> sink   weight(x)   for weight(x) > 0
    source -> x     infinite     if x is required         x -> y      infinite    if x requires y

Source: Picard, "Maximal closure of a graph", Management Science 22 (1976); the flow is Dinic's
(1970). Weights are integers, so that nothing is lost to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

_Thing = TypeVar("_Thing", bound=Hashable)


def least_closure(
    weights: Mapping[_Thing, int],
    asks: Mapping[_Thing, Collection[_Thing]],
    required: Collection[_Thing],
) -> frozenset[_Thing]:
    """Return the closed set of least weight with all required things; of several the smallest.

    Args:
        weights: Weight of each thing.
        asks: For each thing (or only for some) the things that it requires.
        required: Things that must be taken.
    """
    index = {name: at + 2 for at, name in enumerate(weights)}
    network = _Network(len(index) + 2)
    unlimited = 1 + sum(map(abs, weights.values()))
    for name, weight in weights.items():
        if name in required:
            network.add(_SOURCE, index[name], unlimited)
        elif weight < 0:
            network.add(_SOURCE, index[name], -weight)
        if weight > 0:
            network.add(index[name], _SINK, weight)
        for other in asks.get(name, ()):
            network.add(index[name], index[other], unlimited)
    reached = network.source_side()
    return frozenset(name for name, at in index.items() if reached[at])


_SOURCE, _SINK = 0, 1


class _Network:
    """Capacities of the edges between numbered nodes; edge `e` and `e ^ 1` are opposite."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(size)]
        self.heads: list[int] = []
        self.left: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        for at, to, room in ((tail, head, capacity), (head, tail, 0)):
            self.edges[at].append(len(self.heads))
            self.heads.append(to)
            self.left.append(room)

    def source_side(self) -> list[bool]:
        """Send as much as fits from source to sink; return which nodes the source still reaches."""
        while True:
            levels = [-1] * len(self.edges)
            levels[_SOURCE] = 0
            queue = deque([_SOURCE])
            while queue:
                node = queue.popleft()
                for edge in self.edges[node]:
                    head = self.heads[edge]
                    if self.left[edge] and levels[head] < 0:
                        levels[head] = levels[node] + 1
                        queue.append(head)
            if levels[_SINK] < 0:
                return [level >= 0 for level in levels]
            begin = [0] * len(self.edges)
            while self._send(levels, begin):
                pass

    def _send(self, levels: list[int], begin: list[int]) -> bool:
        """Send along one shortest path; return whether there was one."""
        path: list[int] = []
        node = _SOURCE
        while node != _SINK:
            edges = self.edges[node]
            while begin[node] < len(edges):
                edge = edges[begin[node]]
                head = self.heads[edge]
                if self.left[edge] and levels[head] == levels[node] + 1:
                    break
                begin[node] += 1
            else:
                if not path:
                    return False
                node = self.heads[path.pop() ^ 1]
                begin[node] += 1
                continue
            path.append(edges[begin[node]])
            node = self.heads[path[-1]]
        amount = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount
        return True
