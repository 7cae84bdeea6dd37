"""Moves on the strategies that matter: those that the messages say put the bound up little.

    strategies of a node    a b c d e f g h        by reduced cost, the present one marked
    the core                a b . . e*. . .        its tables have 9 of 64 pairs of such an edge

Trees take time by the pairs of all edges, most of which no good assignment takes. In a core, all
nodes and all memory rows are there, with some strategies each: moves are many times as fast, and
what they find is an assignment of the whole problem. Another core is drawn from time to time.

Source: Balas and Zemel, "An algorithm for large zero-one knapsack problems", Operations Research 28
(1980) (the core of a problem).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.moves import TreeMoves
from sbp_planner.choice.penalties import Penalties
from sbp_planner.choice.problem import Floats, Ints

#: With at most so many allowed pairs, moves are quick enough with all strategies.
_MANY_ARCS = 60_000


class Core:
    """Moves on some strategies of a problem.

    Args:
        compact: The problem.
        forbidden: In place of inf.
        usual: See `Penalties`.
        seed: Of the random numbers.
        kept: Which columns are left, bool, one of each node at least; None: all.

    Attributes:
        part: The problem with these strategies only.
        trees: Moves on the part.
        penalties: The same, with penalties for memory.
    """

    def __init__(
        self,
        compact: Compact,
        forbidden: float,
        usual: float,
        seed: int = 0,
        kept: NDArray[np.bool_] | None = None,
    ) -> None:
        self.compact = compact
        self.kept = kept
        self.part = compact if kept is None else restricted(compact, kept)
        if kept is not None:
            self._place = np.cumsum(kept) - 1
            self._column = np.flatnonzero(kept)
        self.trees = TreeMoves(self.part, forbidden, seed)
        self.penalties = Penalties(self.part, self.trees, usual, seed)

    def improve(self, values: Ints, prices: Floats) -> Ints:
        """See `TreeMoves.improve`; values are of the whole problem, here and below."""
        return self._whole(self.trees.improve(self._inner(values), prices))

    def drawn(self, values: Ints, prices: Floats, temperature: float) -> Ints:
        """See `TreeMoves.drawn`."""
        return self._whole(self.trees.drawn(self._inner(values), prices, temperature))

    def fitted(self, values: Ints, prices: Floats, until: float) -> Ints:
        """See `Penalties.fitted`."""
        return self._whole(self.penalties.fitted(self._inner(values), prices, until))

    def oscillated(self, values: Ints, prices: Floats, until: float) -> Ints:
        """See `Penalties.oscillated`."""
        return self._whole(self.penalties.oscillated(self._inner(values), prices, until))

    def holds(self, values: Ints) -> bool:
        """Return whether all strategies of an assignment are left."""
        return self.kept is None or bool(self.kept[self.compact.first[:-1] + values].all())

    def _inner(self, values: Ints) -> Ints:
        if self.kept is None:
            return values
        inner: Ints = self._place[self.compact.first[:-1] + values] - self.part.first[:-1]
        return inner

    def _whole(self, values: Ints) -> Ints:
        if self.kept is None:
            return values
        whole: Ints = self._column[self.part.first[:-1] + values] - self.compact.first[:-1]
        return whole


def near(compact: Compact, values: Ints, reduced: Floats, part: float) -> NDArray[np.bool_] | None:
    """Return which strategies put the bound up least, and those that are present.

    Args:
        compact: The problem.
        values: The present strategy of each node.
        reduced: Of each column, by how much it puts the bound up.
        part: Of all columns, that is left.

    Returns:
        Of each column whether it is left; None if there are few pairs.
    """
    if len(compact.flat.entries) <= _MANY_ARCS or part >= 1:
        return None
    reduced = np.where(np.isfinite(reduced), reduced, np.inf)
    kept = (
        reduced
        <= np.partition(reduced, int(part * (len(reduced) - 1)))[int(part * (len(reduced) - 1))]
    )
    kept |= reduced == np.repeat(np.minimum.reduceat(reduced, compact.first[:-1]), compact.sizes)
    kept[compact.first[:-1] + values] = True
    result: NDArray[np.bool_] = kept & np.isfinite(compact.cost)
    return result


def restricted(compact: Compact, kept: NDArray[np.bool_]) -> Compact:
    """Return the problem with some columns only, of each node one at least."""
    own = [np.flatnonzero(part) for part in np.split(kept, compact.first[1:-1])]
    sizes = np.array([len(part) for part in own], dtype=np.int64)
    some = kept[compact.held_column]
    return replace(
        compact,
        cost=compact.cost[kept],
        first=np.concatenate([[0], np.cumsum(sizes)]),
        tables=tuple(
            table[own[u]][:, own[v]]
            for (u, v), table in zip(compact.edges, compact.tables, strict=True)
        ),
        held_column=(np.cumsum(kept) - 1)[compact.held_column[some]],
        held_first=compact.held_first[some],
        held_end=compact.held_end[some],
        held_bytes=compact.held_bytes[some],
    )
