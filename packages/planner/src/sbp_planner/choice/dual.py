"""A lower bound for large problems, by passing messages; good assignments on the way; pruning.

Memory rows are priced: with a price λ_t >= 0 for each byte above the capacity of row t,

    L(λ) = min over s of  cost(s) + sum_t λ_t (bytes_t(s) - capacity_t)     <=  the least cost

What is left has costs of nodes θ_i and of edges θ_uv only. Messages M move cost between a node and
its edges, which changes no total:

    θ'_i = θ_i + sum_j M_ji          θ'_ij = θ_ij - M_ij - M_ji

so that the sum of all minima is a bound, for any M. A sweep visits the nodes in order; each sends
its cost, in equal parts, over the edges ahead (TRW-S):

    sweep ahead       1 --> 2 --> 3 --> 4        each node also takes a strategy: the best for what
    sweep back        1 <-- 2 <-- 3 <-- 4        the nodes before it took and the messages of others

A strategy or pair whose minimum in that sum puts the bound above the cost of a known assignment is
in no better one: it is forbidden (*pruned*).

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", IEEE
Transactions on Pattern Analysis and Machine Intelligence 28 (2006), section 4; Held, Wolfe and
Crowder, "Validation of subgradient optimization", Mathematical Programming 6 (1974) (the prices);
Cooper et al., "Soft arc consistency revisited", Artificial Intelligence 174 (2010) (pruning).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints

#: Sweeps without a better bound after which the prices go back to the best, and move less.
_PATIENCE = 8


@dataclass(slots=True, eq=False)
class _Edge:
    """One edge as one of its ends sees it."""

    number: int
    other: int
    table: Floats  # (strategies of this end, of the other)
    sent: Floats  # message of the other end to this one, in place
    back: Floats  # message of this end to the other, in place


@dataclass(slots=True, eq=False)
class _Node:
    ahead: list[_Edge] = field(default_factory=list)
    behind: list[_Edge] = field(default_factory=list)


class DualAscent:
    """Messages and prices of a problem.

    Attributes:
        bound: The best bound so far.
        prices: λ at the bound so far, float64 of shape (rows,), in cost a byte.
    """

    def __init__(self, compact: Compact) -> None:
        self.compact = compact
        self.bound = -inf
        finite = [table[table < inf] for table in compact.tables]
        spread = float(np.ptp(compact.cost)) + sum(float(np.ptp(t)) for t in finite if len(t))
        # In place of inf: above what any assignment costs against another, so that bounds hold.
        self.forbidden = 2 * spread + 1.0
        self.price = np.zeros(len(compact.capacity))
        self.prices = self.price
        self._step = 0.5
        self._worse = 0
        self._direction = np.zeros(len(compact.capacity))
        self.last_bound = -inf
        self._messages: list[tuple[Floats, Floats]] = []
        self.nodes = [_Node() for _ in range(compact.num_nodes)]
        for number, ((u, v), table) in enumerate(zip(compact.edges, compact.tables, strict=True)):
            soft = np.where(table < inf, table, self.forbidden)
            to_u, to_v = np.zeros(len(soft)), np.zeros(soft.shape[1])
            self._messages.append((to_u, to_v))
            self.nodes[u].ahead.append(_Edge(number, v, soft, to_u, to_v))
            self.nodes[v].behind.append(_Edge(number, u, soft.T, to_v, to_u))
        # How the last sweep back shared the cost of each node: its total, the part for each edge.
        self._total: list[Floats] = [np.zeros(0)] * compact.num_nodes
        self._share = [0.0] * compact.num_nodes
        self._least_node: list[float] = [0.0] * compact.num_nodes
        self._least_edge: list[float] = [0.0] * len(compact.edges)

    def _own(self) -> list[Floats]:
        """Return the costs of each node with its bytes at present prices."""
        compact = self.compact
        cost = compact.cost
        if len(self.price):
            before = np.concatenate([[0.0], np.cumsum(self.price)])
            paid = compact.held_bytes * (before[compact.held_end] - before[compact.held_first])
            cost = cost + np.bincount(compact.held_column, paid, minlength=len(cost))
        return [cost[a:b] for a, b in pairwise(compact.first.tolist())]

    def sweep(self) -> Ints:
        """Sweep ahead and back, raise the bound if it is higher, and return an assignment.

        Returns:
            Strategy of each node, int64; it may take forbidden pairs, or not fit.
        """
        own = self._own()
        values = np.zeros(len(own), dtype=np.int64)
        for number, node in enumerate(self.nodes):
            total = own[number]
            choice = own[number]
            for edge in node.behind:
                total = total + edge.sent
                choice = choice + edge.table[:, values[edge.other]]
            for edge in node.ahead:
                total = total + edge.sent
                choice = choice + edge.sent
            values[number] = choice.argmin()
            if node.ahead:
                share = total / max(len(node.ahead), len(node.behind))
                for edge in node.ahead:
                    message = ((share - edge.sent)[:, None] + edge.table).min(axis=0)
                    edge.back[:] = message - message.min()
        bound = self.compact.constant - float(self.price @ self.compact.capacity)
        for number in reversed(range(len(own))):
            node = self.nodes[number]
            total = own[number]
            for edge in node.ahead:
                total = total + edge.sent
            for edge in node.behind:
                total = total + edge.sent
            parts = max(len(node.ahead), len(node.behind), 1)
            share = total / parts
            for edge in node.behind:
                message = ((share - edge.sent)[:, None] + edge.table).min(axis=0)
                least = float(message.min())
                edge.back[:] = message - least
                self._least_edge[edge.number] = least
                bound += least
            least = (1 - len(node.behind) / parts) * float(total.min())
            self._least_node[number] = least
            self._total[number] = total
            self._share[number] = 1 / parts
            bound += least
        self.last_bound = bound
        if bound > self.bound:
            self.bound = bound
            self.prices = self.price
        return values

    def move_prices(self, values: Ints, best_cost: float) -> None:
        """Raise the prices of rows that an assignment exceeds, and lower those with room (Polyak).

        Args:
            values: What the last sweep returned.
            best_cost: Of the best assignment known; `inf` if none is.
        """
        if not len(self.price):
            return
        # Assignments jump between extremes: what is followed is their running mean.
        excess = self.compact.excess(values).astype(np.float64)
        self._direction = 0.7 * self._direction + 0.3 * excess
        if self.last_bound >= self.bound:
            self._worse = 0
            self._step = min(self._step * 1.2, 1.0)
        else:
            self._worse += 1
        if self._worse == _PATIENCE:
            self._worse = 0
            self._step *= 0.5
            self.price = self.prices
        direction = np.where((self._direction < 0) & (self.price == 0), 0.0, self._direction)
        square = float(direction @ direction)
        if square == 0.0:
            return
        target = min(best_cost, self.bound + 0.1 * abs(self.bound) + 1.0)
        length = self._step * max(target - self.bound, 1e-4 * abs(self.bound)) / square
        self.price = np.maximum(self.price + length * direction, 0.0)

    def improve(self, deadline: float, sweeps: int, best_cost: float) -> list[Ints]:
        """Sweep some times, moving prices, and return the assignments found."""
        found = []
        for _ in range(sweeps):
            if time.monotonic() >= deadline:
                break
            values = self.sweep()
            found.append(values)
            self.move_prices(values, best_cost)
        return found

    def reduced_costs(self) -> tuple[list[Floats], list[Floats]]:
        """Return by how much a strategy, or a pair, puts the bound up; to be called after a sweep.

        No assignment with it costs less than `last_bound` and that.

        Returns:
            For each node by strategy, float64 >= 0; for each edge by pair, `inf` if forbidden.
        """
        nodes = [
            (1 - len(node.behind) * share) * total - least
            for node, share, total, least in zip(
                self.nodes, self._share, self._total, self._least_node, strict=True
            )
        ]
        pairs: list[Floats] = []
        for number, (u, v) in enumerate(self.compact.edges):
            to_u, to_v = self._messages[number]
            # v is the later one: it put its share into this edge in the sweep back.
            table = self.compact.tables[number] - to_u[:, None] - to_v[None, :]
            table = table + (self._share[v] * self._total[v])[None, :] - self._least_edge[number]
            nodes[u] = nodes[u] + table.min(axis=1)
            nodes[v] = nodes[v] + table.min(axis=0)
            pairs.append(table)
        # An assignment with a pair has both of its strategies.
        for number, (u, v) in enumerate(self.compact.edges):
            ends = np.maximum(nodes[u][:, None], nodes[v][None, :])
            pairs[number] = np.maximum(pairs[number], ends)
        return nodes, pairs
