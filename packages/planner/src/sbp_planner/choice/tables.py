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
