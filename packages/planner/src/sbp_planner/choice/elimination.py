"""Problems without memory whose graph is narrow: bucket elimination, exact.

Whether it can be done in time is told before: nodes are taken away on paper, the one with the
smallest table first, and the entries of all tables counted.

    o--o--o--o        a ladder: each table is over three nodes, whatever the length
    |  |  |  |
    o--o--o--o

Source: Dechter, "Bucket elimination", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import heapq
from math import prod

import numpy as np

from sbp_core.infer import Factor, minimise
from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Ints

#: Entries of one table, and of all, at most: some seconds.
_MAX_ENTRIES = 1 << 20
_MAX_TOTAL_ENTRIES = 1 << 25


def eliminated(compact: Compact) -> Ints | None:
    """Return the best strategies, int64; None if there is memory or the graph is too wide."""
    sizes = [int(size) for size in compact.sizes]
    if len(compact.capacity) or not _is_narrow(compact, sizes):
        return None
    first = compact.first.tolist()
    factors = [Factor((i,), compact.cost[first[i] : first[i + 1]]) for i in range(len(sizes))]
    factors += [
        Factor(edge, table) for edge, table in zip(compact.edges, compact.tables, strict=True)
    ]
    found = minimise(sizes, factors, [0] * len(sizes), max_entries=_MAX_ENTRIES, max_rounds=1)
    return np.asarray(found.values, dtype=np.int64) if found.exact else None


def _is_narrow(compact: Compact, sizes: list[int]) -> bool:
    """Return whether all tables of an elimination are small."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for u, v in compact.edges:
        neighbours[u].add(v)
        neighbours[v].add(u)

    def entries(node: int) -> int:
        return sizes[node] * prod(sizes[other] for other in neighbours[node])

    queue = [(entries(node), node) for node in range(len(sizes))]
    heapq.heapify(queue)
    gone = [False] * len(sizes)
    total = 0
    while queue:
        count, node = heapq.heappop(queue)
        if gone[node] or count != entries(node):
            continue
        total += count
        if count > _MAX_ENTRIES or total > _MAX_TOTAL_ENTRIES:
            return False
        gone[node] = True
        around = neighbours[node]
        for other in around:
            neighbours[other] |= around
            neighbours[other] -= {node, other}
        for other in around:
            heapq.heappush(queue, (entries(other), other))
    return True
