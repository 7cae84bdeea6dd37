"""Improve an assignment: free some nodes, hold the others, solve what is free as a program.

The nodes that are freed hang together, or hold memory at one row near its capacity:

    held  . . o===o . .        costs of edges to held nodes are costs of the freed ones; memory of
              |   |            held nodes is taken from the capacity
    held  . . o===o . .

As many are freed as can be solved in about a second: more after a quick solve, fewer after one that
ran out of time. While an assignment does not fit, what is minimised is the part by which it
exceeds; while it takes forbidden pairs, these cost a lot instead.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP 1998 (large neighbourhood search).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.program import solve_program

#: Allowed pairs among freed nodes, to begin with, at least, and at most.
_PAIRS = 6_000.0
_FEWEST_PAIRS = 200.0
_MOST_PAIRS = 60_000.0

#: Seconds for one integer program, and what is quick.
_SOLVE_S = 4.0
_QUICK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Merit:
    """What is compared: forbidden pairs first, then bytes above capacity, then cost."""

    forbidden: int
    excess: int
    cost: float


class Neighbourhoods:
    """Large neighbourhood search on one problem.

    Attributes:
        values: The present assignment, int64 of shape (nodes,).
    """

    def __init__(self, compact: Compact, values: Ints, seed: int = 0) -> None:
        self.compact = compact
        # In place of forbidden pairs while the assignment has some.
        finite = [float(np.abs(t[t < inf]).max()) for t in compact.tables if (t < inf).any()]
        largest = max([1.0, *finite, float(np.abs(compact.cost).max(initial=0.0))])
        self.soft = replace(
            compact,
            tables=tuple(np.where(table < inf, table, 10 * largest) for table in compact.tables),
        )
        self.edges_of: list[list[int]] = [[] for _ in range(compact.num_nodes)]
        for number, (u, v) in enumerate(compact.edges):
            self.edges_of[u].append(number)
            self.edges_of[v].append(number)
        self.pairs = np.array([int((t < inf).sum()) for t in compact.tables], dtype=np.int64)
        self.node_of = np.repeat(np.arange(compact.num_nodes), compact.sizes)
        self.random = np.random.default_rng(seed)
        self.budget = _PAIRS
        self.values = values
        self.merit = self._merit(values)

    @property
    def fits(self) -> bool:
        """Whether the present assignment is allowed and fits."""
        return self.merit.forbidden == 0 and self.merit.excess == 0

    def replace_values(self, values: Ints) -> None:
        """Go on from another assignment, if it is better."""
        merit = self._merit(values)
        if merit < self.merit:
            self.values, self.merit = values, merit

    def _merit(self, values: Ints) -> _Merit:
        compact = self.compact
        pairs = zip(compact.edges, compact.tables, strict=True)
        forbidden = sum(1 for (u, v), table in pairs if table[values[u], values[v]] == inf)
        excess = max(int(compact.excess(values).max(initial=0)), 0)
        return _Merit(forbidden=forbidden, excess=excess, cost=self.soft.total(values))

    def step(self, deadline: float) -> bool:
        """Free some nodes and solve; return whether the assignment became better."""
        free = self._chosen()
        if not len(free):
            return False
        compact = self.soft if self.merit.forbidden else self.compact
        part, kept = _part(compact, free, self.values, self.edges_of)
        began = time.monotonic()
        # A node in the part has lost the strategies that held nodes forbid; so may have its own.
        start = [
            np.flatnonzero(own == self.values[node]) for node, own in zip(free, kept, strict=True)
        ]
        result = solve_program(
            part,
            min(deadline, began + _SOLVE_S),
            gap=1e-5,
            start=np.array([int(at[0]) for at in start]) if all(map(len, start)) else None,
            elastic=self.merit.excess > 0,
        )
        took = time.monotonic() - began
        if took < _QUICK_S:
            self.budget = min(self.budget * 1.2, _MOST_PAIRS)
        elif not result.optimal:
            self.budget = max(self.budget * 0.7, _FEWEST_PAIRS)
        if result.values is None:
            return False
        values = self.values.copy()
        values[free] = [own[s] for own, s in zip(kept, result.values, strict=True)]
        merit = self._merit(values)
        if not merit < self.merit:
            return False
        self.values, self.merit = values, merit
        return True

    def _chosen(self) -> Ints:
        """Return the nodes to free: grown from a random one, or from some that share a row."""
        seeds: Iterable[int] = self.random.integers(0, self.compact.num_nodes, 1).tolist()
        if self.merit.forbidden:
            values = self.values
            bad = [
                u
                for (u, v), table in zip(self.compact.edges, self.compact.tables, strict=True)
                if table[values[u], values[v]] == inf
            ]
            seeds = [int(self.random.choice(bad))]
        elif len(self.compact.held_column) and (self.merit.excess or self.random.random() < 0.5):
            seeds = self._sharing_memory() or seeds
        return self._grown(list(seeds))

    def _sharing_memory(self) -> list[int]:
        compact = self.compact
        excess = compact.excess(self.values)
        if self.merit.excess:
            tight = np.flatnonzero(excess > 0.9 * excess.max())
        else:
            room = -excess / np.maximum(compact.capacity, 1)
            tight = np.flatnonzero(room <= 0.05)
        if not len(tight):
            return []
        row = int(self.random.choice(tight))
        live = (compact.held_first <= row) & (row < compact.held_end)
        nodes = np.unique(self.node_of[compact.held_column[live]])
        return [int(n) for n in self.random.permutation(nodes)[: 2 + len(nodes) // 2]]

    def _grown(self, seeds: list[int]) -> Ints:
        """Take in neighbours of the nodes, in random order, while pairs are left in the budget."""
        chosen: dict[int, None] = {}
        frontier: dict[int, None] = dict.fromkeys(seeds)
        pairs = 0
        while frontier and pairs < self.budget:
            keys = list(frontier) if len(frontier) < 64 else list(frontier)[:64]
            node = keys[int(self.random.integers(len(keys)))]
            del frontier[node]
            chosen[node] = None
            pairs += int(self.compact.first[node + 1] - self.compact.first[node])
            for number in self.edges_of[node]:
                u, v = self.compact.edges[number]
                other = v if u == node else u
                if other in chosen:
                    pairs += int(self.pairs[number])
                else:
                    frontier[other] = None
        return np.array(sorted(chosen), dtype=np.int64)


def _part(
    compact: Compact, free: Ints, values: Ints, edges_of: list[list[int]]
) -> tuple[Compact, list[Ints]]:
    """Return the problem of some nodes while the others are held, and the strategies it keeps."""
    place = {int(node): at for at, node in enumerate(free)}
    cost: list[Floats] = []
    inner: set[int] = set()
    for node in place:
        own = compact.cost[compact.first[node] : compact.first[node + 1]]
        for number in edges_of[node]:
            u, v = compact.edges[number]
            if u in place and v in place:
                inner.add(number)
            elif u == node:
                own = own + compact.tables[number][:, values[v]]
            else:
                own = own + compact.tables[number][values[u]]
        cost.append(own)
    kept = [np.flatnonzero(own < inf) for own in cost]
    kept = [own if len(own) else np.arange(len(c)) for own, c in zip(kept, cost, strict=True)]
    sizes = [len(own) for own in kept]
    first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    edges, tables = [], []
    for number in sorted(inner):
        u, v = (place[node] for node in compact.edges[number])
        edges.append((u, v))
        tables.append(compact.tables[number][np.ix_(kept[u], kept[v])])
    # New column of each column; -1 of those that are held or gone.
    column = np.full(len(compact.cost), -1, dtype=np.int64)
    for node, at in place.items():
        column[compact.first[node] + kept[at]] = np.arange(first[at], first[at + 1])
    chosen = np.zeros(len(compact.cost), dtype=np.int64)
    held_nodes = np.ones(compact.num_nodes, dtype=bool)
    held_nodes[free] = False
    chosen[(compact.first[:-1] + values)[held_nodes]] = 1
    some = column[compact.held_column] >= 0
    part = Compact(
        cost=np.concatenate([c[own] for c, own in zip(cost, kept, strict=True)]),
        first=first,
        edges=tuple(edges),
        tables=tuple(tables),
        capacity=compact.capacity - compact.profile(chosen),
        held_column=column[compact.held_column[some]],
        held_first=compact.held_first[some],
        held_end=compact.held_end[some],
        held_bytes=compact.held_bytes[some],
    )
    return part, kept
