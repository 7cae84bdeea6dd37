"""Improve an assignment by the trees of a forest: many small changes at once, with memory priced.

The best strategies of all trees at present prices change some nodes. Those that hang together in a
tree are a *piece*; pieces do not touch, so their costs add up, and each may be taken alone:

    o---O---O---o---O---o        O changes, o stays: two pieces

A piece that costs less is taken if what it holds fits. Where memory is short a piece that costs
more may free what others make better use of: all that the prices call for are taken, first those
that free memory, then the others while they fit; the costs alone decide whether that stays.

Where an assignment exceeds capacities, or may for a while, a *penalty* for each byte above takes
the place of the limit: a piece is taken if cost and penalties together fall.

Source: Savchynskyy et al., "Getting feasible variable estimates from infeasible ones", 2012; Glover
and Hao, "The case for strategic oscillation", Annals of Operations Research 183 (2011) (penalties).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.forest import Forest, Forests
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.tables import ragged

#: First and end row of spans, and bytes more.
Spans = tuple[Ints, Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pieces:
    """Changes that may be taken one by one.

    Args:
        changed: The nodes that change.
        place: Of each of them its piece.
        proposed: The strategies of all nodes if all pieces are taken.
        cost: Of each piece what it costs more, float64.
        priced: The same, with prices.
        spans: Of each piece the spans that change.
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
    """Improves assignments of one problem.

    Args:
        compact: The problem.
        forbidden: In place of inf.
        seed: Of the random trees.
    """

    def __init__(self, compact: Compact, forbidden: float, seed: int = 0) -> None:
        self.compact = compact
        self.forbidden = forbidden
        self.random = np.random.default_rng(seed)
        self.forests = Forests(compact, forbidden, seed)
        # Spans of each column: places in the order of columns.
        self._span_order = np.argsort(compact.held_column, kind="stable")
        columns = np.arange(len(compact.cost) + 1)
        self._span_first = np.searchsorted(compact.held_column[self._span_order], columns)

    def improve(self, values: Ints, prices: Floats) -> Ints:
        """Return an assignment that costs no more, or exceeds capacities less, by one forest.

        No row gets farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
        """
        pieces = self._pieces(values, self._priced(prices))
        if pieces is None:
            return values
        cost, priced = pieces.cost, pieces.priced
        frees = np.flatnonzero((cost > 0) & (priced < 0))
        others = np.flatnonzero(cost <= 0)
        others = others[np.argsort(np.minimum(priced, cost)[others], kind="stable")]
        usage = self.compact.excess(values)
        order = np.concatenate([frees[np.argsort(priced[frees], kind="stable")], others])
        room = _Room(usage, pieces.spans)
        chosen = [piece for piece in order.tolist() if room.takes(piece)]
        fits = not len(usage) or usage.max() <= 0
        if fits and len(frees):
            # What freed memory that nothing made use of is taken back, the dearest first.
            dearest = frees[np.argsort(-cost[frees], kind="stable")].tolist()
            needless = {piece for piece in dearest if piece in room.taken and room.returns(piece)}
            chosen = [piece for piece in chosen if piece not in needless]
            if cost[chosen].sum() >= 0:
                room = _Room(usage, pieces.spans)
                chosen = [piece for piece in others.tolist() if room.takes(piece)]
        return pieces.taken(values, chosen)

    def drawn(self, values: Ints, prices: Floats, temperature: float) -> Ints:
        """Return an assignment drawn at random, the more likely the less it costs, by one forest.

        Each strategy's cost has noise added (Gumbel), as much as the temperature. No row gets
        farther above its capacity than it is.

        Args:
            values: The strategy of each node.
            prices: λ of each row, in cost a byte.
            temperature: In terms of cost.
        """
        own = self._priced(prices)
        noise = temperature * self.random.gumbel(size=len(own))
        pieces = self._pieces(values, own - noise)
        if pieces is None:
            return values
        room = _Room(self.compact.excess(values), pieces.spans)
        order = self.random.permutation(len(pieces.cost)).tolist()
        return pieces.taken(values, [piece for piece in order if room.takes(piece)])

    def eased(self, values: Ints, prices: Floats, penalty: Floats) -> Ints:
        """Return an assignment of which cost and penalties together are no more, by one forest.

        No pair becomes forbidden.

        Args:
            values: The strategy of each node.
            prices: λ of each row that pieces are proposed by, in cost a byte.
            penalty: Of each row for each byte above its capacity, in cost.
        """
        pieces = self._pieces(values, self._priced(prices))
        if pieces is None:
            return values
        room = _Room(self.compact.excess(values), pieces.spans, penalty)
        order = np.argsort(pieces.priced, kind="stable")
        order = order[pieces.cost[order] < 0.5 * self.forbidden]
        cost = pieces.cost.tolist()
        chosen = [piece for piece in order.tolist() if room.pays(piece, cost[piece])]
        return pieces.taken(values, chosen)

    def _priced(self, prices: Floats) -> Floats:
        compact = self.compact
        if not len(prices):
            return compact.cost
        before = np.concatenate([[0.0], np.cumsum(prices)])
        paid = compact.held_bytes * (before[compact.held_end] - before[compact.held_first])
        own: Floats = compact.cost + np.bincount(
            compact.held_column, paid, minlength=len(compact.cost)
        )
        return own

    def _pieces(self, values: Ints, own: Floats) -> _Pieces | None:
        """Return what the best strategies of the next forest change; None if nothing."""
        forest = self.forests.next()
        proposed = self.forests.best(forest, values, own)
        changed = np.flatnonzero(proposed != values)
        if not len(changed):
            return None
        piece = _joined(forest, proposed != values)
        names, place = np.unique(piece[changed], return_inverse=True)
        count = len(names)
        compact, flat = self.compact, self.compact.flat
        old, new = compact.first[changed] + values[changed], compact.first[changed]
        new = new + proposed[changed]
        cost = np.bincount(place, compact.cost[new] - compact.cost[old], count).astype(np.float64)
        priced = np.bincount(place, own[new] - own[old], count).astype(np.float64)
        of_node = np.full(compact.num_nodes, -1, dtype=np.int64)
        of_node[changed] = place
        # Of an edge one end may stay, whose piece is -1: its place is that of the other end.
        ends = of_node[flat.ends].max(axis=1)
        edges = np.flatnonzero(ends >= 0)
        entries = self.forests.entries
        more = entries[flat.chosen(proposed)[edges]] - entries[flat.chosen(values)[edges]]
        added = np.bincount(ends[edges], more, count).astype(np.float64)
        return _Pieces(
            changed=changed,
            place=place,
            proposed=proposed,
            cost=cost + added,
            priced=priced + added,
            spans=self._spans(values, proposed, changed, place, count),
        )

    def _spans(
        self, values: Ints, proposed: Ints, changed: Ints, place: Ints, count: int
    ) -> list[Spans]:
        """Return for each piece the spans that change."""
        compact = self.compact
        parts = []
        for sign, strategies in ((-1, values), (1, proposed)):
            column = compact.first[changed] + strategies[changed]
            lengths = self._span_first[column + 1] - self._span_first[column]
            spans = self._span_order[ragged(self._span_first[column], lengths)]
            parts.append(
                np.stack(
                    [
                        np.repeat(place, lengths),
                        compact.held_first[spans],
                        compact.held_end[spans],
                        sign * compact.held_bytes[spans],
                    ]
                )
            )
        every = np.concatenate(parts, axis=1)
        every = every[:, np.argsort(every[0], kind="stable")]
        ends = np.searchsorted(every[0], np.arange(count + 1)).tolist()
        return [(every[1, a:b], every[2, a:b], every[3, a:b]) for a, b in pairwise(ends)]


class _Room:
    """The memory that pieces may take.

    Args:
        excess: Bytes of each row above its capacity.
        spans: Of each piece the spans that change.
        penalty: Of each row for a byte above its capacity, for `pays`.

    Attributes:
        taken: The pieces that `takes` has taken.
    """

    def __init__(self, excess: Ints, spans: list[Spans], penalty: Floats | None = None) -> None:
        self.excess = excess.copy()
        self.most = np.maximum(excess, 0)
        self.spans = spans
        self.penalty = penalty
        self.taken: set[int] = set()

    def takes(self, piece: int) -> bool:
        """Take a piece if no row gets farther above its capacity than it was."""
        fits = self._change(piece, 1)
        if fits:
            self.taken.add(piece)
        return fits

    def returns(self, piece: int) -> bool:
        """Take a piece back, on the same condition."""
        fits = self._change(piece, -1)
        if fits:
            self.taken.discard(piece)
        return fits

    def pays(self, piece: int, cost: float) -> bool:
        """Take a piece if its cost and what penalties rise by are below 0."""
        assert self.penalty is not None
        if not len(self.spans[piece][0]):
            return cost < 0
        low, high, level = self._level(piece, 1)
        before = self.excess[low:high]
        after = before + level
        more = np.maximum(after, 0) - np.maximum(before, 0)
        if cost + float(self.penalty[low:high] @ more) >= 0:
            return False
        self.excess[low:high] = after
        return True

    def _change(self, piece: int, sign: int) -> bool:
        if not len(self.spans[piece][0]):
            return True
        low, high, level = self._level(piece, sign)
        after = self.excess[low:high] + level
        if ((after > self.most[low:high]) & (level > 0)).any():
            return False
        self.excess[low:high] = after
        return True

    def _level(self, piece: int, sign: int) -> tuple[int, int, Ints]:
        """Return the rows at which a piece holds other bytes, and how many more."""
        first, end, more = self.spans[piece]
        low, high = int(first.min()), int(end.max())
        change = np.zeros(high - low + 1, dtype=np.int64)
        np.add.at(change, first - low, sign * more)
        np.subtract.at(change, end - low, sign * more)
        level: Ints = np.cumsum(change)[:-1]
        return low, high, level


def _joined(forest: Forest, changes: Ints) -> Ints:
    """Return of each node that changes the node nearest to the root of its piece."""
    piece = np.arange(len(changes))
    for depth in forest.depths[1:]:
        both = changes[depth.nodes] & changes[depth.parent]
        piece[depth.nodes[both]] = piece[depth.parent[both]]
    return piece
