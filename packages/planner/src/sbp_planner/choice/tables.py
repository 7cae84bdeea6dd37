"""The tables of all edges in one flat array, so that a whole assignment is read at once.

edge 0 (2 x 3)      edge 1 (2 x 2)
a b c | d e f       g h | i j             `entries`; row by row, `inf` where forbidden
0                   6            10       `first`
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.problem import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatTables:
    """Tables of edges, one after the other.

    Args:
        ends: Nodes of each edge, int64 of shape (edges, 2).
        entries: Costs of all pairs, float64.
        first: Of each edge its first entry, and at the end their number, int64.
        widths: Of each edge the strategies of its second node, int64.
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
        """Return the entry of each edge that an assignment takes, int64 of shape (edges,)."""
        chosen: Ints = self.first[:-1] + values[self.ends[:, 0]] * self.widths
        return chosen + values[self.ends[:, 1]]

    def columns(self, first: Ints, end: int) -> Ints:
        """Return of each entry the column of its strategy of one end (0 or 1) of the edge.

        Args:
            first: Of each node its first column.
            end: Which end.
        """
        sizes = np.diff(self.first)
        place = ragged(np.zeros_like(sizes), sizes)
        widths = np.repeat(self.widths, sizes)
        own = place // widths if end == 0 else place % widths
        columns: Ints = own + np.repeat(first[self.ends[:, end]], sizes)
        return columns

    @property
    def rows(self) -> Ints:
        """Of each edge the strategies of its first node."""
        rows: Ints = np.diff(self.first) // np.maximum(self.widths, 1)
        return rows

    def transposed(self) -> Ints:
        """Return the entries in the order of transposed tables, as places in `entries`."""
        lengths = np.repeat(self.rows, self.widths)
        base = ragged(self.first[:-1], self.widths)
        inner = ragged(np.zeros_like(lengths), lengths)
        order: Ints = np.repeat(base, lengths) + inner * np.repeat(
            np.repeat(self.widths, self.widths), lengths
        )
        return order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arcs:
    """The allowed pairs of all edges, each edge twice: from its first node to its second, and back.

    Direction `e` of m edges goes from the first node of edge e, direction `m + e` back. A strategy
    of a receiver that no strategy of the sender allows has one arc, which costs `forbidden`.

    Args:
        sender, receiver: Nodes of each direction.
        strategy: Of each arc the sender's, int32; sorted by direction, strategy of the receiver,
            strategy of the sender.
        cost: Its cost.
        first: Of each direction its first arc, and at the end their number.
        counts: Arcs of each strategy of the receiver, direction by direction.
        counts_first: Of each direction its first count, and at the end their number.
        forbidden: More than any assignment costs against another.
    """

    sender: Ints
    receiver: Ints
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
        kept = allowed(cost)
        if len(cost):
            none = ~np.logical_or.reduceat(kept, begins)
            cost[begins[none]], kept[begins[none]] = forbidden, True
        before = np.concatenate([[0], np.cumsum(kept)])
        counts = before[begins + lengths] - before[begins]
        counts_first = np.concatenate([[0], np.cumsum(np.concatenate([widths, rows]))])
        arcs = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            sender=flat.ends.T.ravel(),
            receiver=flat.ends.T[::-1].ravel(),
            strategy=ragged(np.zeros_like(lengths), lengths)[kept].astype(np.int32),
            cost=cost[kept],
            first=arcs[counts_first],
            counts=counts,
            counts_first=counts_first,
            forbidden=forbidden,
        )

    def gather(self, directions: Ints, sizes: Ints) -> tuple[NDArray[np.int32], Floats, Ints]:
        """Return the arcs of some directions.

        Args:
            directions: Which.
            sizes: Strategies of each node.

        Returns:
            Of each arc the place of its sender's strategy among those of all senders, one after the
            other, and its cost; and where the arcs of each strategy of a receiver begin.
        """
        lengths = self.first[directions + 1] - self.first[directions]
        arcs = ragged(self.first[directions], lengths)
        sent = sizes[self.sender[directions]]
        place = np.repeat(np.cumsum(sent) - sent, lengths) + self.strategy[arcs]
        received = sizes[self.receiver[directions]]
        counts = self.counts[ragged(self.counts_first[directions], received)]
        return place.astype(np.int32), self.cost[arcs], np.cumsum(counts) - counts


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """Return the ranges that start there and are so long, one after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    result: Ints = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    return result


def first_least(values: Floats, starts: Ints, lengths: Ints) -> Ints:
    """Return the place of the first least entry of each stretch of `values`, none empty."""
    least = np.repeat(np.minimum.reduceat(values, starts), lengths)
    place = np.where(values == least, np.arange(len(values)), len(values))
    found: Ints = np.minimum.reduceat(place, starts) - starts
    return found


def allowed(entries: Floats) -> NDArray[np.bool_]:
    """Return which entries are not forbidden."""
    return entries < inf
