"""`Graph`: a choice problem that `reduce` shrinks, and a record to extend solutions to all nodes.

A node may hold memory over several spans, because it includes the memory of nodes that follow it.
Each step that removes a strategy or a node is recorded, so that an assignment of the rest can be
extended to all nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.problem import ChoiceProblem, Floats, Ints, memory_rows

Indices = NDArray[np.intp]

#: Bytes of each strategy, by the span of memory rows (first, end) over which they are held.
Spans = dict[tuple[int, int], Ints]


class NothingAllowedError(Exception):
    """No assignment is allowed: a node lost its last strategy, or memory is too small for any."""


class _Step(NamedTuple):
    """A node takes `table[strategies of others]`; if it is the other, its old strategies."""

    node: int
    others: tuple[int, ...]
    table: NDArray[np.intp]


class Graph:
    """A choice problem that shrinks.

    Attributes:
        cost: For each node, float64 of shape (strategies,).
        tables: For each node, its neighbours with the table of their edge, float64 of shape (own
            strategies, theirs); both ends share one table, one of them transposed.
        spans: For each node its memory, with least usage 0: what any strategy holds is in `base`.
        changed: For each node, the neighbours whose edge changed since it was last looked at.
        alive: Whether the node is still there.
        constant: Cost of all removed nodes and edges.
        times: The remaining memory rows, as times of the problem.
        base: At each row, the change in the bytes that are held by any choice; one entry longer.
        limit: Bytes, or None if memory cannot bind.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        self.cost: list[Floats] = [cost.copy() for cost in problem.costs]
        self.tables: list[dict[int, Floats]] = [{} for _ in self.cost]
        self.spans: list[Spans] = [{} for _ in self.cost]
        self.changed: list[set[int]] = [set() for _ in self.cost]
        self.alive = [True] * len(self.cost)
        self.constant = 0.0
        self._steps: list[_Step] = []
        for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
            if u == v:
                self.cost[u] = self.cost[u] + np.diagonal(table)
            else:
                self.add_edge(u, v, table)
        self.limit = None if problem.usages is None else problem.usage_limit
        self.times: Ints = np.zeros(0, dtype=np.int64)
        self.base: Ints = np.zeros(1, dtype=np.int64)
        if problem.usage_limit is not None and problem.usage_limit < 0:
            raise NothingAllowedError
        if self.limit is not None and problem.usages is not None:
            assert problem.intervals is not None
            self.times, rows = memory_rows(problem.intervals)
            self.base = np.zeros(len(self.times) + 1, dtype=np.int64)
            for node, (first, end) in enumerate(rows.tolist()):
                if first < end:
                    self._add_span(node, (first, end), problem.usages[node])
            self.drop_slack_rows()

    def copy(self) -> Graph:
        """Return a separate graph; both share arrays, which are never changed in place."""
        other = copy(self)
        other.cost = list(self.cost)
        other.tables = [dict(tables) for tables in self.tables]
        other.spans = [dict(spans) for spans in self.spans]
        other.changed = [set(changed) for changed in self.changed]
        other.alive = list(self.alive)
        other.base = self.base.copy()
        other._steps = list(self._steps)
        return other

    def add_edge(self, u: int, v: int, table: Floats) -> None:
        """Add a table, of shape (strategies of u, of v), to the edge between two nodes."""
        present = self.tables[u].get(v)
        self.set_edge(u, v, table if present is None else present + table)

    def set_edge(self, u: int, v: int, table: Floats) -> None:
        """Replace the table of an edge."""
        self.tables[u][v] = table
        self.tables[v][u] = table.T
        self.changed[u].add(v)
        self.changed[v].add(u)

    def drop_edge(self, u: int, v: int) -> None:
        """Take an edge away."""
        del self.tables[u][v], self.tables[v][u]

    def keep(self, node: int, kept: Indices) -> None:
        """Restrict the strategies of a node to some."""
        if not len(kept):
            raise NothingAllowedError
        self._steps.append(_Step(node, (node,), kept))
        self.cost[node] = self.cost[node][kept]
        for other, table in self.tables[node].items():
            self.set_edge(node, other, table[kept])
        spans, self.spans[node] = self.spans[node], {}
        for span, usage in spans.items():
            self._add_span(node, span, usage[kept])

    def follow(self, node: int, leader: int, strategies: Indices) -> None:
        """Let a node take `strategies[strategy of leader]`, and merge it into the leader."""
        self._steps.append(_Step(node, (leader,), strategies))
        cost = self.cost[leader] + self.cost[node][strategies]
        tables, spans = self.tables[node], self.spans[node]
        if leader in tables:
            cost = cost + tables[leader][strategies, np.arange(len(strategies))]
        self.cost[leader] = cost
        self._remove(node)
        for other, table in tables.items():
            if other != leader:
                self.add_edge(leader, other, table[strategies])
        for span, usage in spans.items():
            self._add_span(leader, span, usage[strategies])

    def eliminate(self, node: int) -> None:
        """Replace a node without memory by the minimum over its strategies.

        The node has at most two neighbours.
        """
        others = tuple(self.tables[node])
        total = self.cost[node].reshape(-1, *[1] * len(others))
        for axis, other in enumerate(others):
            table = self.tables[node][other]
            shape = [len(table), *[1] * len(others)]
            shape[axis + 1] = table.shape[1]
            total = total + table.reshape(shape)
        least = total.min(axis=0)
        self._steps.append(_Step(node, others, np.asarray(total.argmin(axis=0))))
        self._remove(node)
        if len(others) == 2:
            self.add_edge(*others, least)
        elif others:
            self.cost[others[0]] = self.cost[others[0]] + least
        else:
            self.constant += float(least)

    def _remove(self, node: int) -> None:
        for other in self.tables[node]:
            del self.tables[other][node]
        self.tables[node] = {}
        self.spans[node] = {}
        self.alive[node] = False

    def _add_span(self, node: int, span: tuple[int, int], usage: Ints) -> None:
        present = self.spans[node].pop(span, None)
        if present is not None:
            usage = present + usage
        least = int(usage.min())
        if least:
            self.base[span[0]] += least
            self.base[span[1]] -= least
            usage = usage - least
        if usage.any():
            self.spans[node][span] = usage

    def drop_slack_rows(self) -> set[int]:
        """Remove the memory rows that no choice can exceed.

        Returns:
            Nodes whose memory changed.

        Raises:
            NothingAllowedError: If every choice exceeds some row.
        """
        assert self.limit is not None
        held = np.cumsum(self.base)[:-1]
        if (held > self.limit).any():
            raise NothingAllowedError
        change = np.zeros(len(self.base), dtype=np.int64)
        for spans in self.spans:
            for (first, end), usage in spans.items():
                most = int(usage.max())
                change[first] += most
                change[end] -= most
        kept = held + np.cumsum(change)[:-1] > self.limit
        if kept.all():
            return set()
        place = np.concatenate([[0], np.cumsum(kept)]).tolist()
        self.times = self.times[kept]
        self.base = np.append(np.diff(held[kept], prepend=0), 0)
        touched = set()
        for node, spans in enumerate(self.spans):
            if spans:
                self.spans[node] = {}
                for (first, end), usage in spans.items():
                    if place[first] < place[end]:
                        self._add_span(node, (place[first], place[end]), usage)
                if len(self.spans[node]) < len(spans):
                    touched.add(node)
        return touched

    def misfits(self) -> list[tuple[int, Indices]]:
        """Return the nodes with a strategy that does not fit even with the least bytes elsewhere.

        Returns:
            Node, and the strategies that may fit: none, if not even one does.
        """
        assert self.limit is not None
        if not len(self.times):
            return []
        room = _Least(np.asarray(self.limit - np.cumsum(self.base)[:-1], dtype=np.int64))
        found = []
        for node, spans in enumerate(self.spans):
            fits: NDArray[np.bool_] | None = None
            for (first, end), usage in spans.items():
                least = room.between(first, end)
                if usage.max() > least:
                    fits = (usage <= least) if fits is None else fits & (usage <= least)
            if fits is not None:
                found.append((node, np.flatnonzero(fits)))
        return found

    def extend(self, strategies: dict[int, int]) -> list[int]:
        """Return the strategy of every node, given the strategies of the remaining nodes."""
        values = [strategies.get(node, 0) for node in range(len(self.cost))]
        for node, others, table in reversed(self._steps):
            values[node] = int(table[tuple(values[v] for v in others)])
        return values

    def project(self, assignment: Sequence[int]) -> dict[int, int]:
        """Return the strategies of the remaining nodes in a full assignment.

        A node whose strategy was removed is left out.
        """
        values = dict(enumerate(assignment))
        for node, others, kept in self._steps:
            strategy = values.pop(node, None)
            if strategy is not None and others == (node,):
                place = np.flatnonzero(kept == strategy)
                if len(place):
                    values[node] = int(place[0])
        return values


class _Least:
    """Minima of ranges of an array, each in two look-ups among ranges of powers of two."""

    def __init__(self, values: Ints) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= len(values):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def between(self, first: int, end: int) -> int:
        """Return the minimum of the entries from `first` to before `end`."""
        level = (end - first).bit_length() - 1
        values = self._levels[level]
        return int(min(values[first], values[end - (1 << level)]))
