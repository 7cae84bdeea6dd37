"""Improve the strategies of a large choice problem by many small changes at once, along trees.

`large_search` uses this. `forest` draws the trees. Memory has a price for each byte and time.

At present prices, the best strategies of all trees change some nodes. Changed nodes that are
connected in a tree are a *piece*. Pieces do not touch, so their costs add up, and each may be taken
alone:

    o---O---O---o---O---o        O changes, o stays: two pieces

A piece that costs less is taken if its memory fits. If memory is short, a piece that costs more may
free memory that other pieces use better. So all pieces that pay at the prices are taken: first
those that free memory, then the others while they fit. The costs alone decide whether that stays.

If an assignment exceeds capacities, or may for a while, a *penalty* for each byte above replaces
the limit: a piece is taken if the sum of cost and penalties falls. The penalty of a row rises while
the row is above its capacity, and stays otherwise. Rows near their capacity are also priced when
pieces are proposed, by a random part of their penalty: enough to keep them below, or little enough
to let other pieces in. An assignment that fits is improved this way, too: penalties are lowered, in
some stretch of time or everywhere, and rise again until it fits (*oscillation*).

The time of trees grows with the pairs of all edges, most of which no good assignment takes. A
*core* has all nodes and all memory rows, but only the strategies that raise the bound little. Moves
are many times as fast, and their result is an assignment of the whole problem.

    strategies of a node    a b c d e f g h        by reduced cost, the present one marked
    the core                a b . . e*. . .        its tables have 9 of 64 pairs of such an edge

Source: Savchynskyy et al., "Getting feasible variable estimates from infeasible ones", 2012; Glover
and Hao, "The case for strategic oscillation", Annals of Operations Research 183 (2011) (penalties);
Morris, "The breakout method for escaping from local minima", AAAI 1993 (penalties that rise); Balas
and Zemel, "An algorithm for large zero-one knapsack problems", Operations Research 28 (1980) (the
core of a problem).
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sbp_planner.choice.compact import Compact, Mask, ragged
from sbp_planner.choice.large.forest import Forests
from sbp_planner.choice.problem import Floats, Ints

#: The factor by which the penalty of a row above its capacity rises from forest to forest, and the
#: addition for each part above, in terms of a usual price.
_RISE = 1.25
_ADDED = 1.0

#: A row is near its capacity if no more than this part of it is free.
_NEAR = 0.02

#: So many forests without fewer bytes above capacity end the search.
_VAIN = 60

#: Forests with lowered penalties, and the range of the factor that lowers them.
_LOW_FORESTS = 4
_LOWERED = (0.2, 0.9)

#: The spread of the logarithm of the prices from forest to forest.
_PRICE_SPREAD = 0.25

#: With at most so many pairs, moves are quick enough with all strategies.
_MANY_PAIRS = 60_000

#: First and end row of spans, and their change in bytes.
Spans = tuple[Ints, Ints, Ints]


class _Pieces(NamedTuple):
    """Changes that may be taken one by one.

    Args:
        changed: The nodes that change.
        place: For each of them, the index of its piece.
        proposed: The strategies of all nodes if all pieces are taken.
        cost: For each piece its change in cost, float64.
        priced: The same, with prices.
        spans: For each piece the spans that change.
    """

    changed: Ints
    place: Ints
    proposed: Ints
    cost: Floats
    priced: Floats
    spans: list[Spans]

    def taken(self, values: Ints, chosen: list[int]) -> Ints:
        """Return the values with some pieces taken."""
        some = np.zeros(len(self.cost), dtype=bool)
        some[chosen] = True
        nodes = self.changed[some[self.place]]
        result = values.copy()
        result[nodes] = self.proposed[nodes]
        return result


class TreeMoves:
    """Improves assignments of one problem; with a core, these are still of the whole problem.

    Args:
        compact: The problem.
        forbidden: A finite cost in place of `inf`.
        usual: A price at which the memory of a row costs as much as a node, in cost a byte.
        seed: Seed of the random trees.
        kept: The columns in the core, bool, at least one of each node; None: all.

    Attributes:
        part: The problem with only the strategies of the core.
        penalty: The penalty of each row, in cost a byte, float64.
    """

    def __init__(
        self,
        compact: Compact,
        forbidden: float,
        usual: float = 1.0,
        seed: int = 0,
        kept: Mask | None = None,
    ) -> None:
        self.compact, self.forbidden, self.usual = compact, forbidden, usual
        self.kept = np.ones(len(compact.cost), dtype=bool) if kept is None else kept
        self.part = part = compact if kept is None else restricted(compact, kept)
        self._place, self._column = np.cumsum(self.kept) - 1, np.flatnonzero(self.kept)
        self.random = np.random.default_rng(seed)
        self.forests = Forests(part, forbidden, seed)
        self.penalty = np.zeros(len(part.capacity))
        self._capacity = np.maximum(part.capacity, 1).astype(np.float64)
        # Spans of each column: indices in the order of columns.
        self._span_order = np.argsort(part.held_column, kind="stable")
        columns = np.arange(len(part.cost) + 1)
        self._span_first = np.searchsorted(part.held_column[self._span_order], columns)

    def holds(self, values: Ints) -> bool:
        """Return whether all strategies of an assignment are in the core."""
        return bool(self.kept[self.compact.first[:-1] + values].all())

    def inner(self, values: Ints) -> Ints:
        """Return an assignment of the whole problem in terms of the core."""
        if self.part is self.compact:
            return values
        inner: Ints = self._place[self.compact.first[:-1] + values] - self.part.first[:-1]
        return inner

    def whole(self, values: Ints) -> Ints:
        """Return an assignment of the core in terms of the whole problem."""
        if self.part is self.compact:
            return values
        whole: Ints = self._column[self.part.first[:-1] + values] - self.compact.first[:-1]
        return whole

    def improve(self, values: Ints, prices: Floats) -> Ints:
        """Return an assignment that costs no more, or exceeds capacities less, by one forest.

        No row gets farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
        """
        start = self.inner(values)
        pieces = self._pieces(start, self.part.priced(prices))
        if pieces is None:
            return values
        cost, priced = pieces.cost, pieces.priced
        frees = np.flatnonzero((cost > 0) & (priced < 0))
        others = np.flatnonzero(cost <= 0)
        others = others[np.argsort(np.minimum(priced, cost)[others], kind="stable")]
        usage = self.part.excess(start)
        order = np.concatenate([frees[np.argsort(priced[frees], kind="stable")], others])
        room = _Room(usage, pieces.spans)
        chosen = [piece for piece in order.tolist() if room.takes(piece)]
        fits = not len(usage) or usage.max() <= 0
        if fits and len(frees):
            # Pieces that freed memory for nothing are taken back, the most expensive first.
            taken = set(chosen)
            dearest = frees[np.argsort(-cost[frees], kind="stable")].tolist()
            needless = {piece for piece in dearest if piece in taken and room.takes(piece, -1)}
            chosen = [piece for piece in chosen if piece not in needless]
            if cost[chosen].sum() >= 0:
                room = _Room(usage, pieces.spans)
                chosen = [piece for piece in others.tolist() if room.takes(piece)]
        return self.whole(pieces.taken(start, chosen))

    def drawn(self, values: Ints, prices: Floats, temperature: float) -> Ints:
        """Return an assignment drawn at random, the more likely the less it costs, by one forest.

        Noise (Gumbel) is added to each strategy's cost, in proportion to the temperature. No row
        gets farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
            temperature: Temperature, in units of cost.
        """
        start, own = self.inner(values), self.part.priced(prices)
        pieces = self._pieces(start, own - temperature * self.random.gumbel(size=len(own)))
        if pieces is None:
            return values
        room = _Room(self.part.excess(start), pieces.spans)
        order = self.random.permutation(len(pieces.cost)).tolist()
        return self.whole(pieces.taken(start, [piece for piece in order if room.takes(piece)]))

    def fitted(self, values: Ints, prices: Floats, until: float) -> Ints:
        """Return an assignment that fits, or of all that were tried the one nearest to fitting.

        Args:
            values: The first assignment.
            prices: λ of each row, in cost a byte.
            until: Time of `time.monotonic` at which it ends, in s.
        """
        self.penalty = np.maximum(self.penalty, prices)
        present = self.inner(values)
        best, least, vain = values, self._above(present).sum(), 0
        while least > 0 and vain < _VAIN and time.monotonic() < until:
            above = self._above(present)
            risen = self.penalty * _RISE + _ADDED * self.usual * above
            self.penalty = np.where(above > 0, risen, self.penalty)
            present = self._eased(present, prices)
            vain += 1
            if (total := self._above(present).sum()) < least:
                best, least, vain = self.whole(present), total, 0
        return best

    def oscillated(self, values: Ints, prices: Floats, until: float) -> Ints:
        """Return an assignment that was allowed to exceed capacities for a while, then fitted.

        Args:
            values: The first assignment.
            prices: λ of each row, in cost a byte.
            until: Time of `time.monotonic` at which it ends, in s.
        """
        count = len(self.penalty)
        factor = np.full(count, self.random.uniform(*_LOWERED))
        if self.random.random() < 0.7 and count:
            # Only in a stretch of time; elsewhere the penalties stay.
            width = int(np.exp(self.random.uniform(0, np.log(count + 1))))
            first = int(self.random.integers(max(count - width, 0) + 1))
            factor[:first] = factor[first + width :] = 1.0
        self.penalty = np.maximum(self.penalty, prices) * factor
        present = self.inner(values)
        for _ in range(_LOW_FORESTS):
            if time.monotonic() >= until:
                break
            present = self._eased(present, prices * factor)
        self.penalty = np.maximum(self.penalty, 0.5 * prices)
        return self.fitted(self.whole(present), prices, until)

    def _above(self, values: Ints) -> Floats:
        """Return the excess of each row above its capacity, as a part of its capacity."""
        above: Floats = np.maximum(self.part.excess(values), 0) / self._capacity
        return above

    def _eased(self, values: Ints, prices: Floats) -> Ints:
        """Return an assignment with no larger sum of cost and penalties, by one forest.

        No pair becomes forbidden.
        """
        excess = self.part.excess(values)
        near = np.clip(1 + excess / (_NEAR * self._capacity), 0, 1)
        part = np.where(excess > 0, 1.0, near * self.random.random())
        spread = np.exp(self.random.uniform(-1, 1) * _PRICE_SPREAD)
        proposed_by = np.maximum(spread * prices * (near > 0), part * self.penalty)
        pieces = self._pieces(values, self.part.priced(proposed_by))
        if pieces is None:
            return values
        room = _Room(excess, pieces.spans)
        order = np.argsort(pieces.priced, kind="stable")
        order = order[pieces.cost[order] < 0.5 * self.forbidden]
        cost = pieces.cost.tolist()
        chosen = [one for one in order.tolist() if room.pays(one, cost[one], self.penalty)]
        return pieces.taken(values, chosen)

    def _pieces(self, values: Ints, own: Floats) -> _Pieces | None:
        """Return the changes to the best strategies of the next forest; None if there are none."""
        forest = self.forests.next()
        proposed = self.forests.best(forest, values, own)
        changes = proposed != values
        changed = np.flatnonzero(changes)
        if not len(changed):
            return None
        # For each node that changes, the node of its piece nearest to the root.
        piece = np.arange(len(changes))
        for depth in forest.depths[1:]:
            both = changes[depth.nodes] & changes[depth.parent]
            piece[depth.nodes[both]] = piece[depth.parent[both]]
        names, place = np.unique(piece[changed], return_inverse=True)
        count, compact, flat = len(names), self.part, self.part.flat
        old = compact.first[changed] + values[changed]
        new = compact.first[changed] + proposed[changed]
        cost = np.bincount(place, compact.cost[new] - compact.cost[old], count).astype(np.float64)
        priced = np.bincount(place, own[new] - own[old], count).astype(np.float64)
        of_node = np.full(compact.num_nodes, -1, dtype=np.int64)
        of_node[changed] = place
        # If one end of an edge stays, its piece is -1: the edge belongs to the other end's piece.
        ends = of_node[flat.ends].max(axis=1)
        edges = np.flatnonzero(ends >= 0)
        entries = self.forests.entries
        more = entries[flat.chosen(proposed)[edges]] - entries[flat.chosen(values)[edges]]
        added = np.bincount(ends[edges], more, count).astype(np.float64)
        parts = []
        for sign, column in ((-1, old), (1, new)):
            lengths = self._span_first[column + 1] - self._span_first[column]
            spans = self._span_order[ragged(self._span_first[column], lengths)]
            held = compact.held_first[spans], compact.held_end[spans], compact.held_bytes[spans]
            parts.append(np.stack([np.repeat(place, lengths), *held[:2], sign * held[2]]))
        every = np.concatenate(parts, axis=1)
        every = every[:, np.argsort(every[0], kind="stable")]
        bounds = np.searchsorted(every[0], np.arange(count + 1)).tolist()
        return _Pieces(
            changed=changed,
            place=place,
            proposed=proposed,
            cost=cost + added,
            priced=priced + added,
            spans=[(every[1, a:b], every[2, a:b], every[3, a:b]) for a, b in pairwise(bounds)],
        )


class _Room:
    """The memory that pieces may take.

    Args:
        excess: For each row, its bytes above its capacity.
        spans: For each piece the spans that change.
    """

    def __init__(self, excess: Ints, spans: list[Spans]) -> None:
        self.excess = excess.copy()
        self.most = np.maximum(excess, 0)
        self.spans = spans

    def takes(self, piece: int, sign: int = 1) -> bool:
        """Take a piece, or back (-1), if no row gets farther above its capacity than it was."""
        if not len(self.spans[piece][0]):
            return True
        rows, more = self._change(piece, sign)
        after = self.excess[rows] + more
        if ((after > self.most[rows]) & (more > 0)).any():
            return False
        self.excess[rows] = after
        return True

    def pays(self, piece: int, cost: float, penalty: Floats) -> bool:
        """Take a piece if the sum of its cost and the change of penalties is below 0.

        Args:
            piece: Index of the piece.
            cost: Its change in cost.
            penalty: For each row, the penalty of a byte above its capacity.
        """
        if not len(self.spans[piece][0]):
            return cost < 0
        rows, more = self._change(piece, 1)
        after = self.excess[rows] + more
        above = np.maximum(after, 0) - np.maximum(self.excess[rows], 0)
        if cost + float(penalty[rows] @ above) >= 0:
            return False
        self.excess[rows] = after
        return True

    def _change(self, piece: int, sign: int) -> tuple[slice, Ints]:
        """Return the rows at which a piece changes the memory, and the change in bytes."""
        first, end, more = self.spans[piece]
        low, high = int(first.min()), int(end.max())
        change = np.zeros(high - low + 1, dtype=np.int64)
        np.add.at(change, first - low, sign * more)
        np.subtract.at(change, end - low, sign * more)
        return slice(low, high), np.cumsum(change)[:-1]


def near(compact: Compact, values: Ints, reduced: Floats, part: float) -> Mask | None:
    """Return a core: the strategies that raise the bound least, and the present ones.

    Args:
        compact: The problem.
        values: The present strategy of each node.
        reduced: For each column, by how much it raises the bound.
        part: The part of all columns that is kept.

    Returns:
        For each column, whether it is kept; None if there are few pairs.
    """
    if len(compact.flat.entries) <= _MANY_PAIRS or part >= 1:
        return None
    reduced = np.where(np.isfinite(reduced), reduced, np.inf)
    last = int(part * (len(reduced) - 1))
    kept = reduced <= np.partition(reduced, last)[last]
    kept |= reduced == compact.least(reduced)
    kept[compact.first[:-1] + values] = True
    result: Mask = kept & np.isfinite(compact.cost)
    return result


def restricted(compact: Compact, kept: Mask) -> Compact:
    """Return the problem with some columns only, at least one of each node."""
    own = [np.flatnonzero(part) for part in np.split(kept, compact.first[1:-1])]
    tables = [
        table[own[u]][:, own[v]]
        for (u, v), table in zip(compact.edges, compact.tables, strict=True)
    ]
    return compact.restricted(kept, compact.edges, tables)
