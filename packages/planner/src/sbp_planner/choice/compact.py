"""`Compact`: a reduced choice problem as flat numpy arrays, the form that its solvers read.

The problem gives each node a strategy; an edge has a table of costs over two strategies. The tables
of all edges are one array, so that a whole assignment is read at once:

    edge 0 (2 x 3)      edge 1 (2 x 2)
    a b c | d e f       g h | i j             `entries`; row by row, `inf` where forbidden
    0                   6            10       `first`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.reduced_graph import Graph

Array = TypeVar("Array", Floats, Ints)
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatTables:
    """Tables of edges, one after the other.

    Args:
        ends: Nodes of each edge, int64 of shape (edges, 2).
        entries: Costs of all pairs, float64.
        first: For each edge its first entry, and at the end their number, int64.
        widths: For each edge the number of strategies of its second node, int64.
    """

    ends: Ints
    entries: Floats
    first: Ints
    widths: Ints

    @classmethod
    def of(cls, edges: tuple[tuple[int, int], ...], tables: tuple[Floats, ...]) -> FlatTables:
        """Return the tables of edges."""
        sizes = [table.size for table in tables]
        return cls(
            ends=np.array(edges, dtype=np.int64).reshape(-1, 2),
            entries=np.concatenate([table.ravel() for table in tables] or [np.zeros(0)]),
            first=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
            widths=np.array([table.shape[1] for table in tables], dtype=np.int64),
        )

    def chosen(self, values: Ints) -> Ints:
        """Return the entry of each edge for an assignment, int64 of shape (edges,)."""
        chosen: Ints = self.first[:-1] + values[self.ends[:, 0]] * self.widths
        return chosen + values[self.ends[:, 1]]

    @property
    def rows(self) -> Ints:
        """For each edge, the number of strategies of its first node."""
        rows: Ints = np.diff(self.first) // np.maximum(self.widths, 1)
        return rows

    def places(self, end: int) -> Ints:
        """Return, for each entry, the strategy at one end (0 or 1) of its edge."""
        sizes = np.diff(self.first)
        place, widths = ragged(np.zeros_like(sizes), sizes), np.repeat(self.widths, sizes)
        found: Ints = place % widths if end else place // widths
        return found

    def columns(self, first: Ints, end: int) -> Ints:
        """Return, for each entry, the column of its strategy at one end (0 or 1) of the edge.

        Args:
            first: For each node, its first column.
            end: The end, 0 or 1.
        """
        return self.places(end) + np.repeat(first[self.ends[:, end]], np.diff(self.first))

    def transposed(self) -> Ints:
        """Return the order of the entries in transposed tables, as indices into `entries`."""
        lengths = np.repeat(self.rows, self.widths)
        base = ragged(self.first[:-1], self.widths)
        inner = ragged(np.zeros_like(lengths), lengths)
        order: Ints = np.repeat(base, lengths) + inner * np.repeat(
            np.repeat(self.widths, self.widths), lengths
        )
        return order


class Arcs(NamedTuple):
    """The allowed pairs of all edges, each edge twice: from its first node to its second, and back.

    Direction `e` of m edges goes from the first node of edge e, direction `m + e` back. A strategy
    of a receiver that no strategy of the sender allows has one arc, which costs `forbidden`.

    Args:
        strategy: For each arc the sender's strategy, int32; sorted by direction, strategy of the
            receiver, strategy of the sender.
        cost: For each arc its cost.
        first: For each direction its first arc, and at the end their number.
        counts: Number of arcs for each strategy of the receiver, direction by direction.
        counts_first: For each direction its first count, and at the end their number.
        forbidden: More than the costs of any two assignments differ.
    """

    strategy: NDArray[np.int32]
    cost: Floats
    first: Ints
    counts: Ints
    counts_first: Ints
    forbidden: float

    @classmethod
    def of(cls, flat: FlatTables, forbidden: float) -> Arcs:
        """Return the arcs of tables."""
        rows, widths = flat.rows, flat.widths
        order = np.concatenate([flat.transposed(), np.arange(len(flat.entries))])
        cost = flat.entries[order]
        lengths = np.concatenate([np.repeat(rows, widths), np.repeat(widths, rows)])
        begins = np.cumsum(lengths) - lengths
        kept = cost < inf
        if len(cost):
            none = ~np.logical_or.reduceat(kept, begins)
            cost[begins[none]], kept[begins[none]] = forbidden, True
        before = np.concatenate([[0], np.cumsum(kept)])
        counts = before[begins + lengths] - before[begins]
        counts_first = np.concatenate([[0], np.cumsum(np.concatenate([widths, rows]))])
        first = np.concatenate([[0], np.cumsum(counts)])[counts_first]
        strategy = ragged(np.zeros_like(lengths), lengths)[kept].astype(np.int32)
        return cls(strategy, cost[kept], first, counts, counts_first, forbidden)


class Messages(NamedTuple):
    """Messages over some edges, one way: for each strategy of a receiver the least of its sender's.

    Args:
        from_column: Columns of the senders, edge by edge.
        arc_from, arc_cost: For each allowed pair the index of its sender's strategy in
            `from_column`, in the order of `Arcs`, and its cost.
        arc_first: The first pair of each strategy of a receiver.
        to_column: Columns of the receivers, edge by edge.
    """

    from_column: Ints
    arc_from: NDArray[np.int32]
    arc_cost: Floats
    arc_first: Ints
    to_column: Ints

    def least(self, sent: Floats) -> Floats:
        """Return the message to each column of `to_column`.

        Args:
            sent: Costs of the columns `from_column`.
        """
        least: Floats = np.minimum.reduceat(sent[self.arc_from] + self.arc_cost, self.arc_first)
        return least


class EdgeColumns(NamedTuple):
    """Columns at one end of some edges, and their costs given the strategy at the other end.

    Args:
        other: For each column, the node at the other end.
        column: The columns, edge by edge.
        entry, stride: The entry of the flat tables for strategy 0 of the other end, and the
            distance to the entry of its next strategy.
    """

    other: Ints
    column: Ints
    entry: Ints
    stride: Ints

    def costs(self, entries: Floats, values: Ints) -> Floats:
        """Return the cost of each column.

        Args:
            entries: The entries of the flat tables.
            values: The strategy of each node.
        """
        return entries[self.entry + values[self.other] * self.stride]


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: derived values are cached
class Compact:
    """A choice problem in flat arrays; *columns* are all strategies of all nodes, node by node.

    Args:
        cost: For each column its cost, float64, finite.
        first: For each node its first column, and at the end their number, int64.
        edges: Pairs of different nodes, each pair once, first < second.
        tables: For each edge its costs, float64 of shape (strategies of both); `inf` forbids.
        capacity: For each memory row the bytes that choices may hold, int64.
        held_column: For each held span its column, int64; spans of no bytes are left out.
        held_first, held_end: Its half-open range of memory rows, int64.
        held_bytes: Its bytes, int64.
        constant: Cost in addition to the costs of nodes and edges.
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
        return int((self.flat.entries < inf).sum())

    @cached_property
    def flat(self) -> FlatTables:
        """The tables in one array."""
        return FlatTables.of(self.edges, self.tables)

    @cached_property
    def arcs(self) -> Arcs:
        """The allowed pairs, by direction of their edges."""
        finite = np.abs(self.flat.entries[self.flat.entries < inf])
        spread = float(np.ptp(self.cost)) if len(self.cost) else 0.0
        return Arcs.of(self.flat, forbidden=2 * (spread + float(finite.sum())) + 1)

    @cached_property
    def edges_of(self) -> list[list[int]]:
        """The edges of each node."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for number, (u, v) in enumerate(self.edges):
            found[u].append(number)
            found[v].append(number)
        return found

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached values."""
        names = {field.name for field in fields(self)}
        return {name: value for name, value in self.__dict__.items() if name in names}

    def messages(self, edges: Ints, from_second: Mask) -> Messages:
        """Return the messages over some edges.

        Args:
            edges: Numbers of the edges.
            from_second: For each edge, whether the message goes from its second end.
        """
        arcs, directions = self.arcs, edges + from_second * len(self.edges)
        ends = np.where(from_second, self.flat.ends[edges].T[::-1], self.flat.ends[edges].T)
        sender, receiver = ends
        sent, received = self.sizes[sender], self.sizes[receiver]
        lengths = arcs.first[directions + 1] - arcs.first[directions]
        which = ragged(arcs.first[directions], lengths)
        counts = arcs.counts[ragged(arcs.counts_first[directions], received)]
        place = np.repeat(np.cumsum(sent) - sent, lengths) + arcs.strategy[which]
        return Messages(
            from_column=ragged(self.first[sender], sent),
            arc_from=place.astype(np.int32),
            arc_cost=arcs.cost[which],
            arc_first=np.cumsum(counts) - counts,
            to_column=ragged(self.first[receiver], received),
        )

    def edge_columns(self, edges: Ints, second: Mask) -> EdgeColumns:
        """Return the columns at one end of some edges, with their costs.

        Args:
            edges: Numbers of the edges.
            second: For each edge, whether the columns are at its second end.
        """
        flat, ends = self.flat, self.flat.ends[edges]
        node = np.where(second, ends[:, 1], ends[:, 0])
        sizes, widths = self.sizes[node], flat.widths[edges]
        place = ragged(np.zeros_like(sizes), sizes)
        # The next strategy of the second end is the next entry, that of the first end the next row.
        step = np.repeat(np.where(second, 1, widths), sizes)
        return EdgeColumns(
            other=np.repeat(np.where(second, ends[:, 0], ends[:, 1]), sizes),
            column=ragged(self.first[node], sizes),
            entry=np.repeat(flat.first[edges], sizes) + place * step,
            stride=np.repeat(np.where(second, widths, 1), sizes),
        )

    def priced(self, prices: Floats) -> Floats:
        """Return the costs of all columns, with a price for bytes at each memory row."""
        if not len(prices):
            return self.cost
        before = np.concatenate([[0.0], np.cumsum(prices)])
        paid = self.held_bytes * (before[self.held_end] - before[self.held_first])
        return self.cost + np.bincount(self.held_column, paid, len(self.cost)).astype(np.float64)

    def least(self, of_column: Floats) -> Floats:
        """Return, for each column, the least value among the columns of its node."""
        return np.repeat(np.minimum.reduceat(of_column, self.first[:-1]), self.sizes)

    def profile(self, weight: Array) -> Array:
        """Return the bytes held at each memory row, of the dtype of the weights.

        Args:
            weight: The share of each column that is chosen, float64 or int64 of shape (columns,).
        """
        some = np.flatnonzero(weight[self.held_column])
        held = self.held_bytes[some] * weight[self.held_column[some]]
        change = np.zeros(len(self.capacity) + 1, dtype=held.dtype)
        np.add.at(change, self.held_first[some], held)
        np.subtract.at(change, self.held_end[some], held)
        profile: Array = np.cumsum(change)[:-1]
        return profile

    def excess(self, values: Ints) -> Ints:
        """Return the bytes of each memory row above its capacity; <= 0 where it fits.

        Args:
            values: The strategy of each node, int64 of shape (nodes,).
        """
        chosen = np.zeros(len(self.cost), dtype=np.int64)
        chosen[self.first[:-1] + values] = 1
        excess: Ints = self.profile(chosen) - self.capacity
        return excess

    def total(self, values: Ints) -> float:
        """Return the cost of an assignment, `inf` if a pair is forbidden; memory is ignored."""
        pairs = self.flat.entries[self.flat.chosen(values)]
        return float(self.cost[self.first[:-1] + values].sum() + pairs.sum()) + self.constant

    def fits(self, values: Ints) -> bool:
        """Return whether no memory row is above its capacity."""
        return not len(self.capacity) or bool(self.excess(values).max() <= 0)

    def split(self, of_column: Mask, of_entry: Mask) -> tuple[list[Mask], list[Mask]]:
        """Return flags of all columns and all pairs, split by node and by edge."""
        pairs = np.split(of_entry, self.flat.first[1:-1])
        return (
            np.split(of_column, self.first[1:-1]),
            [own.reshape(t.shape) for own, t in zip(pairs, self.tables, strict=False)],
        )

    def restricted(
        self, kept: Mask, edges: Sequence[tuple[int, int]], tables: Sequence[Floats]
    ) -> Compact:
        """Return the problem with some columns only, and the nodes that have any.

        Args:
            kept: For each column, whether it is kept.
            edges: Edges between kept nodes, by their new numbers.
            tables: For each of these edges, its costs.
        """
        counts = np.add.reduceat(kept, self.first[:-1], dtype=np.int64)
        some = kept[self.held_column]
        return replace(
            self,
            cost=self.cost[kept],
            first=np.concatenate([[0], np.cumsum(counts[counts > 0])]),
            edges=tuple(edges),
            tables=tuple(tables),
            held_column=(np.cumsum(kept) - 1)[self.held_column[some]],
            held_first=self.held_first[some],
            held_end=self.held_end[some],
            held_bytes=self.held_bytes[some],
        )


def compacted(graph: Graph) -> tuple[Compact, list[int]]:
    """Return the problem of a reduced graph, and the original numbers of its nodes."""
    nodes = [node for node, alive in enumerate(graph.alive) if alive]
    place = {node: at for at, node in enumerate(nodes)}
    first = np.concatenate([[0], np.cumsum([len(graph.cost[n]) for n in nodes], dtype=np.int64)])
    edges, tables = [], []
    held: list[tuple[int, int, int, int]] = []
    for node in nodes:
        for other, table in graph.tables[node].items():
            if place[node] < place[other]:
                edges.append((place[node], place[other]))
                tables.append(table)
        column = int(first[place[node]])
        for (start, end), usage in graph.spans[node].items():
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
    """Drop memory rows with the same columns and bytes as another row of no more capacity.

    Rows are compared by the sum of bytes times a random odd number for each column, modulo 2^64.
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
    return replace(
        compact,
        capacity=compact.capacity[kept],
        held_column=compact.held_column[some],
        held_first=first[some],
        held_end=end[some],
        held_bytes=compact.held_bytes[some],
    )


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """Return the ranges with given starts and lengths, one after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    result: Ints = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    return result


def first_least(values: Floats, starts: Ints, lengths: Ints) -> Ints:
    """Return the index of the first least entry of each stretch of `values`, none empty."""
    least = np.repeat(np.minimum.reduceat(values, starts), lengths)
    place = np.where(values == least, np.arange(len(values)), len(values))
    found: Ints = np.minimum.reduceat(place, starts) - starts
    return found
