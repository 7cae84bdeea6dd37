"""What reductions leave of a problem: numbered from 0, in flat arrays, as solvers want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np

from sbp_planner.choice.graph import Graph
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.tables import Arcs, FlatTables, allowed

Array = TypeVar("Array", Floats, Ints)


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: what is derived is cached
class Compact:
    """A choice problem in flat arrays; *columns* are all strategies of all nodes, node by node.

    Args:
        cost: Of each column, float64, finite.
        first: Of each node its first column, and at the end their number, int64.
        edges: Pairs of different nodes, each pair once, first < second.
        tables: Of each edge its costs, float64 of shape (strategies of both); `inf` forbids.
        capacity: Of each memory row the bytes that choices may hold, int64.
        held_column: Of each held span its column, int64; spans of no bytes are left out.
        held_first, held_end: Its half-open range of memory rows, int64.
        held_bytes: Its bytes, int64.
        constant: Cost beside that of nodes and edges.
    """

    cost: Floats
    first: Ints
    edges: tuple[tuple[int, int], ...]
    tables: tuple[Floats, ...]
    capacity: Ints
    held_column: Ints
    held_first: Ints
    held_end: Ints
    held_bytes: Ints
    constant: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.first) - 1

    @property
    def sizes(self) -> Ints:
        """Number of strategies of each node."""
        return np.diff(self.first)

    @property
    def num_arcs(self) -> int:
        """Number of allowed pairs of strategies, over all edges."""
        return int(allowed(self.flat.entries).sum())

    @cached_property
    def flat(self) -> FlatTables:
        """The tables in one array."""
        return FlatTables.of(self.edges, self.tables)

    @cached_property
    def arcs(self) -> Arcs:
        """The allowed pairs, by direction of their edges."""
        finite = np.abs(self.flat.entries[allowed(self.flat.entries)])
        spread = float(np.ptp(self.cost)) if len(self.cost) else 0.0
        return Arcs.of(self.flat, forbidden=2 * (spread + float(finite.sum())) + 1)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is derived."""
        names = {field.name for field in fields(self)}
        return {name: value for name, value in self.__dict__.items() if name in names}

    def profile(self, weight: Array) -> Array:
        """Return the bytes held at each memory row, of the dtype of the weights.

        Args:
            weight: How much of each column is chosen, float64 or int64 of shape (columns,).
        """
        some = np.flatnonzero(weight[self.held_column])
        held = self.held_bytes[some] * weight[self.held_column[some]]
        change = np.zeros(len(self.capacity) + 1, dtype=held.dtype)
        np.add.at(change, self.held_first[some], held)
        np.subtract.at(change, self.held_end[some], held)
        profile: Array = np.cumsum(change)[:-1]
        return profile

    def excess(self, values: Ints) -> Ints:
        """Return by how many bytes each memory row is above its capacity; <= 0 if it is not.

        Args:
            values: The strategy of each node, int64 of shape (nodes,).
        """
        chosen = np.zeros(len(self.cost), dtype=np.int64)
        chosen[self.first[:-1] + values] = 1
        excess: Ints = self.profile(chosen) - self.capacity
        return excess

    def total(self, values: Ints) -> float:
        """Return the cost of strategies, `inf` if a pair of them is forbidden; memory apart."""
        pairs = self.flat.entries[self.flat.chosen(values)]
        return float(self.cost[self.first[:-1] + values].sum() + pairs.sum()) + self.constant

    def fits(self, values: Ints) -> bool:
        """Return whether no memory row is above its capacity."""
        return not len(self.capacity) or bool(self.excess(values).max() <= 0)


def compacted(graph: Graph) -> tuple[Compact, list[int]]:
    """Return what is left of a graph, and which of its nodes these are."""
    nodes = [node for node, alive in enumerate(graph.alive) if alive]
    place = {node: at for at, node in enumerate(nodes)}
    first = np.concatenate([[0], np.cumsum([len(graph.cost[n]) for n in nodes], dtype=np.int64)])
    edges, tables = [], []
    for node in nodes:
        for other, table in graph.tables[node].items():
            if place[node] < place[other]:
                edges.append((place[node], place[other]))
                tables.append(table)
    held: list[tuple[int, int, int, int]] = []
    for node in nodes:
        for (start, end), usage in graph.spans[node].items():
            column = int(first[place[node]])
            held += [(column + int(s), start, end, int(usage[s])) for s in np.flatnonzero(usage)]
    columns = np.array(held, dtype=np.int64).reshape(-1, 4).T
    base = np.cumsum(graph.base)[:-1]
    compact = Compact(
        cost=np.concatenate([graph.cost[n] for n in nodes]) if nodes else np.zeros(0),
        first=first,
        edges=tuple(edges),
        tables=tuple(tables),
        capacity=np.asarray((graph.limit or 0) - base, dtype=np.int64),
        held_column=columns[0],
        held_first=columns[1],
        held_end=columns[2],
        held_bytes=columns[3],
        constant=graph.constant,
    )
    return _without_equal_rows(compact), nodes


def _without_equal_rows(compact: Compact) -> Compact:
    """Drop memory rows at which the same columns hold the same bytes as at another, tighter one.

    Rows are told apart by the sum of bytes times a random odd number for each column, modulo 2^64.
    """
    rows = len(compact.capacity)
    if not rows:
        return compact
    factor = np.random.default_rng(0).integers(0, 1 << 63, len(compact.cost), dtype=np.int64) | 1
    with np.errstate(over="ignore"):
        key = compact.profile(factor)
    order = np.lexsort((compact.capacity, key))
    kept = np.ones(rows, dtype=bool)
    kept[order[1:]] = key[order[1:]] != key[order[:-1]]
    place = np.concatenate([[0], np.cumsum(kept)])
    first, end = place[compact.held_first], place[compact.held_end]
    some = first < end
    return Compact(
        cost=compact.cost,
        first=compact.first,
        edges=compact.edges,
        tables=compact.tables,
        capacity=compact.capacity[kept],
        held_column=compact.held_column[some],
        held_first=first[some],
        held_end=end[some],
        held_bytes=compact.held_bytes[some],
        constant=compact.constant,
    )


def as_values(strategies: Sequence[int]) -> Ints:
    """Return strategies as the array that `Compact` works on."""
    return np.asarray(strategies, dtype=np.int64)
