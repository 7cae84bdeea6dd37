"""Improve the strategies of a large choice problem: free some nodes, fix the others, and solve.

`large_search` uses this in turn with the trees of `moves`. An integer program solves each part.

The free nodes are connected, or hold memory at one row near its capacity:

    fixed . . o===o . .        costs of edges to fixed nodes are costs of the free nodes; memory of
              |   |            fixed nodes is taken from the capacity
    fixed . . o===o . .

Reduced costs, once known, guide the search. Nodes whose strategies raise the bound are freed first.
Strategies and pairs of free nodes that raise it a lot are left out. How many is drawn: few nodes
with all of their strategies, or many nodes with the best. The choice with the largest recent gain
is drawn most. As many nodes are freed as can be solved in some seconds: more after a quick solve,
fewer after one that ran out of time. The more solves were in vain, the more seconds (variable
neighbourhood search). While an assignment does not fit, its relative excess is minimised; while
it takes forbidden pairs, these have a large cost instead.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP 1998 (large neighbourhood search); Hansen and Mladenovic, "Variable neighborhood
search", European Journal of Operational Research 130 (2001); Danna, Rothberg and Le Pape,
"Exploring relaxation induced neighborhoods to improve MIP solutions", Mathematical Programming 102
(2005) (the guide).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from sbp_planner.choice.compact import Compact, Mask
from sbp_planner.choice.large.dual import ReducedCosts
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.program import ProgramResult, solve_program

#: Allowed pairs among free nodes: at first, at least, and at most.
_PAIRS = 6_000.0
_FEWEST_PAIRS = 200.0
_MOST_PAIRS = 100_000.0

#: Seconds for one integer program, at least and at most; the factors for these after one in vain,
#: and after another; the part of them that counts as quick, and the growth of the neighbourhoods
#: after one that was very quick, or quick; the part of the remaining time for one program.
_SOLVE_S = (3.0, 30.0)
_MORE_S = 1.1
_LESS_S = 0.6
_QUICK = 0.25
_GROWTH = 1.6
_LITTLE_GROWTH = 1.2
_SOLVE_PART = 0.1

#: Parts of all pairs that are kept, according to the guide.
_PARTS = (1.0, 0.3, 0.1, 0.03)

#: Least numbers of kept pairs, if edges have very many: for each edge, and for all.
_FEW_AN_EDGE = 4
_FEW = 8_000.0

#: Decay of the average gain of a kind of neighbourhood; least weight of a kind when one is drawn.
_MEMORY = 0.8
_LEAST_WEIGHT = 0.15


class Merit(NamedTuple):
    """Compared in order: forbidden pairs, bytes above the capacities of all rows, cost."""

    forbidden: int
    excess: float
    cost: float


@dataclass(slots=True, eq=False)
class _Kind:
    """Neighbourhoods that keep one part of the pairs.

    Attributes:
        room: Reduced cost up to which strategies and pairs are kept.
        pairs: Kept pairs of each edge.
        budget: Number of pairs among free nodes.
        gain: Its recent gain, in cost a second.
    """

    room: float
    pairs: Ints
    budget: float = _PAIRS
    gain: float = 0.0


class Proposal(NamedTuple):
    """Nodes to free, and their program.

    Args:
        part: The program of these nodes.
        free: The nodes.
        kept: Their strategies in the part.
        start: The present strategies, as indices of the part; None if one of them is left out.
        elastic: Whether capacities may be exceeded.
        rows: Memory rows that will probably bind.
        kind: Index of its kind of neighbourhood.
    """

    part: Compact
    free: Ints
    kept: list[Ints]
    start: Ints | None
    elastic: bool
    rows: list[int]
    kind: int


class Neighbourhoods:
    """Large neighbourhood search on one problem.

    Attributes:
        values: The present assignment, int64 of shape (nodes,).
        merit: Its merit.
    """

    def __init__(self, compact: Compact, values: Ints, seed: int = 0) -> None:
        self.compact = compact
        # The cost of forbidden pairs while the assignment has some.
        self.allowed = compact.flat.entries < inf
        finite = np.abs(compact.flat.entries[self.allowed])
        largest = max(1.0, finite.max(initial=0), float(np.abs(compact.cost).max(initial=0)))
        self.forbidden = 10 * largest
        self.node_of = np.repeat(np.arange(compact.num_nodes), compact.sizes)
        self.random = np.random.default_rng(seed)
        self.guide: ReducedCosts | None = None
        self.rows: Ints = np.zeros(0, dtype=np.int64)
        self.kinds = [_Kind(inf, self._pairs(self.allowed))]
        self.seconds = _SOLVE_S[0]
        self.values = values
        self.merit = self._merit(values)

    @property
    def fits(self) -> bool:
        """Whether the present assignment is allowed and fits."""
        return self.merit.forbidden == 0 and self.merit.excess == 0

    def follow(self, guide: ReducedCosts, prices: Floats) -> None:
        """Use reduced costs as the guide from now on; rows with a price will probably bind."""
        self.guide = guide
        self.rows = np.flatnonzero(prices)
        pairs = guide.pairs
        every = pairs[self.allowed]
        few = max(_FEW_AN_EDGE * len(self.compact.edges), _FEW) / max(len(every), 1)
        parts = _PARTS if few >= 0.5 * _PARTS[-1] else (*_PARTS, few)
        places = [int(part * (len(every) - 1)) for part in parts]
        every = np.partition(every, places) if len(every) else every
        old = self.kinds
        self.kinds = []
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            room = inf if part == 1 or not len(every) else every[place]
            kind = _Kind(float(room), self._pairs(pairs <= min(room, 1e300)))
            if number < len(old):
                kind.budget, kind.gain = old[number].budget, old[number].gain
            self.kinds.append(kind)

    def _pairs(self, kept: Mask) -> Ints:
        before = np.concatenate([[0], np.cumsum(kept)])
        first = self.compact.flat.first
        pairs: Ints = before[first[1:]] - before[first[:-1]]
        return pairs

    def replace_values(self, values: Ints) -> None:
        """Continue from another assignment, if it is better."""
        merit = self._merit(values)
        if merit < self.merit:
            self.values, self.merit = values, merit

    def _merit(self, values: Ints) -> Merit:
        compact = self.compact
        pairs = compact.flat.entries[compact.flat.chosen(values)]
        good = pairs < inf
        forbidden = len(pairs) - int(good.sum())
        excess = float(np.maximum(compact.excess(values), 0).sum(dtype=np.float64))
        cost = float(compact.cost[compact.first[:-1] + values].sum() + pairs[good].sum())
        return Merit(
            forbidden=forbidden,
            excess=excess,
            cost=cost + compact.constant + self.forbidden * forbidden,
        )

    def step(self, deadline: float) -> bool:
        """Free some nodes and solve; return whether the assignment became better."""
        proposal = self.propose()
        if proposal is None:
            return False
        began = time.monotonic()
        most = max(min(self.seconds, _SOLVE_PART * (deadline - began)), _SOLVE_S[0])
        result = solve_program(
            proposal.part,
            min(deadline, began + most),
            gap=1e-5,
            start=proposal.start,
            elastic=proposal.elastic,
            rows=proposal.rows,
        )
        return self.accept(proposal, result, time.monotonic() - began)

    def propose(self, larger: float = 1.0) -> Proposal | None:
        """Return nodes to free; None if there are none.

        Args:
            larger: The factor by which it may be larger than usual.
        """
        number = self._drawn_kind()
        free = self._chosen(self.kinds[number], larger)
        if not len(free):
            return None
        part, kept = self._part(free, self.kinds[number].room)
        # The part lacks strategies that fixed nodes forbid, perhaps also the present ones.
        places = zip(free, kept, strict=True)
        start = [np.flatnonzero(own == self.values[node]) for node, own in places]
        found = np.array([int(at[0]) for at in start]) if all(map(len, start)) else None
        elastic = self.merit.excess > 0
        return Proposal(part, free, kept, found, elastic, self.rows.tolist(), number)

    def accept(self, proposal: Proposal, result: ProgramResult, took_s: float) -> bool:
        """Accept a result if it improves the assignment; return whether it does."""
        kind = self.kinds[proposal.kind % len(self.kinds)]
        if took_s < _QUICK * self.seconds:
            growth = _GROWTH if took_s < _QUICK**2 * self.seconds else _LITTLE_GROWTH
            kind.budget = min(kind.budget * growth, _MOST_PAIRS)
        elif not result.optimal:
            kind.budget = max(kind.budget * 0.7, _FEWEST_PAIRS)
        gain, better = 0.0, False
        if result.values is not None:
            values = self.values.copy()
            values[proposal.free] = [
                own[s] for own, s in zip(proposal.kept, result.values, strict=True)
            ]
            merit = self._merit(values)
            better = merit < self.merit
            if better:
                gain = max(self.merit.cost - merit.cost, 0.0) if self.fits else 1.0
                self.values, self.merit = values, merit
        longer = self.seconds * (_LESS_S if better else _MORE_S)
        self.seconds = min(max(longer, _SOLVE_S[0]), _SOLVE_S[1])
        kind.gain = _MEMORY * kind.gain + (1 - _MEMORY) * gain / max(took_s, 0.05)
        return better

    def _drawn_kind(self) -> int:
        gains = np.array([kind.gain for kind in self.kinds])
        weights = gains / gains.sum() if gains.sum() > 0 else np.zeros(len(gains))
        weights = np.maximum(weights, _LEAST_WEIGHT)
        return int(self.random.choice(len(weights), p=weights / weights.sum()))

    def _chosen(self, kind: _Kind, larger: float) -> Ints:
        """Return the nodes to free: grown from one node, or from some that share a memory row."""
        seeds = [self._drawn_node()]
        if self.merit.forbidden:
            flat, values = self.compact.flat, self.values
            bad = np.flatnonzero(~self.allowed[flat.chosen(values)])
            seeds = [int(flat.ends[int(self.random.choice(bad)), 0])]
        elif len(self.compact.held_column) and (self.merit.excess or self.random.random() < 0.5):
            seeds = self._sharing_memory() or seeds
        return self._grown(seeds, kind, larger)

    def _drawn_node(self) -> int:
        """Draw a node; nodes whose strategies raise the bound are more likely."""
        above = np.zeros(self.compact.num_nodes)
        if self.guide is not None and self.random.random() >= 0.3:
            above = np.maximum(self.guide.nodes[self.compact.first[:-1] + self.values], 0.0)
            above[~np.isfinite(above)] = 0.0
        if not above.sum() > 0:
            return int(self.random.integers(len(above)))
        return int(self.random.choice(len(above), p=above / above.sum()))

    def _sharing_memory(self) -> list[int]:
        compact = self.compact
        excess = compact.excess(self.values)
        if self.merit.excess:
            tight = np.flatnonzero(excess > 0.9 * excess.max())
        elif len(self.rows) and self.random.random() < 0.7:
            tight = self.rows
        else:
            room = -excess / np.maximum(compact.capacity, 1)
            tight = np.flatnonzero(room <= 0.05)
        if not len(tight):
            return []
        row = int(self.random.choice(tight))
        live = (compact.held_first <= row) & (row < compact.held_end)
        nodes = np.unique(self.node_of[compact.held_column[live]])
        if not len(nodes):
            return []
        # Sometimes few nodes with all of their surroundings, sometimes as many as possible.
        most = 2 + len(nodes) // 2
        some = int(np.exp(self.random.uniform(np.log(2), np.log(most + 1))))
        return [int(n) for n in self.random.permutation(nodes)[:some]]

    def _grown(self, seeds: list[int], kind: _Kind, larger: float) -> Ints:
        """Add neighbours of the nodes, in random order, while the budget has pairs left."""
        chosen: dict[int, None] = {}
        frontier: list[int] = list(dict.fromkeys(seeds))
        seen = set(frontier)
        pairs, budget = 0.0, kind.budget * larger
        share = self.compact.first
        while frontier and pairs < budget:
            # Near the front of the queue: close nodes rather than distant ones.
            at = int(self.random.integers(min(len(frontier), 16)))
            node = frontier.pop(at)
            chosen[node] = None
            pairs += float(share[node + 1] - share[node])
            for number in self.compact.edges_of[node]:
                u, v = self.compact.edges[number]
                other = v if u == node else u
                if other in chosen:
                    pairs += float(kind.pairs[number])
                elif other not in seen:
                    seen.add(other)
                    frontier.append(other)
        return np.array(sorted(chosen), dtype=np.int64)

    def _part(self, free: Ints, room: float) -> tuple[Compact, list[Ints]]:
        """Return the problem of the free nodes with all others fixed, and their strategies."""
        compact, values = self.compact, self.values
        guide = self.guide if room < inf else None
        soft = self.forbidden if self.merit.forbidden else inf
        place = {int(node): at for at, node in enumerate(free)}
        cost: list[Floats] = []
        kept: list[Ints] = []
        inner: set[int] = set()
        for node in place:
            columns = slice(int(compact.first[node]), int(compact.first[node + 1]))
            own = compact.cost[columns]
            for number in self.compact.edges_of[node]:
                u, v = compact.edges[number]
                if u in place and v in place:
                    inner.add(number)
                    continue
                table = compact.tables[number]
                beside = table[:, values[v]] if u == node else table[values[u]]
                own = own + (beside if soft == inf else np.minimum(beside, soft))
            good = own < inf
            if guide is not None:
                near = good & (guide.nodes[columns] <= room)
                near[values[node]] = good[values[node]]
                good = near if near.any() else good
            kept.append(np.flatnonzero(good) if good.any() else np.arange(len(own)))
            cost.append(own)
        edges, tables = [], []
        for number in sorted(inner):
            u, v = compact.edges[number]
            ours, theirs = kept[place[u]], kept[place[v]]
            inside = np.ix_(ours, theirs)
            table = compact.tables[number][inside]
            if soft < inf:
                table = np.minimum(table, soft)
            elif guide is not None:
                first = int(compact.flat.first[number])
                raised = guide.pairs[first : int(compact.flat.first[number + 1])]
                far = raised.reshape(compact.tables[number].shape)[inside] > room
                far &= ~((ours == values[u])[:, None] & (theirs == values[v])[None, :])
                table = np.where(far, inf, table)
            edges.append((place[u], place[v]))
            tables.append(table)
        mask = np.zeros(len(compact.cost), dtype=bool)
        mask[
            np.concatenate([compact.first[n] + own for n, own in zip(place, kept, strict=True)])
        ] = 1
        held = np.zeros(len(compact.cost), dtype=np.int64)
        held[(compact.first[:-1] + values)[np.setdiff1d(np.arange(compact.num_nodes), free)]] = 1
        part = replace(
            compact.restricted(mask, edges, tables),
            cost=np.concatenate([c[own] for c, own in zip(cost, kept, strict=True)]),
            capacity=compact.capacity - compact.profile(held),
            constant=0.0,
        )
        return part, kept
