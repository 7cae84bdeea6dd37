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

Any order of the nodes will do. Nodes that no path of rising order joins are visited together, in
one step of numpy, so the order is one with few such steps (see `schedule`).

The prices follow the bytes of the strategies that the nodes would take by their θ', each with a
weight that falls with what it costs more (a *soft* minimum): strategies that are nearly as good
count as well, which spares the prices most of the zigzag of plain subgradients.

A strategy or pair whose minimum in that sum puts the bound above the cost of a known assignment is
in no better one: it is forbidden (*pruned*).

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", IEEE
Transactions on Pattern Analysis and Machine Intelligence 28 (2006), section 4; Held, Wolfe and
Crowder, "Validation of subgradient optimization", Mathematical Programming 6 (1974) (the prices);
Nesterov, "Smooth minimization of non-smooth functions", Mathematical Programming 103 (2005) (soft
minima); Cooper et al., "Soft arc consistency revisited", Artificial Intelligence 174 (2010)
(pruning).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.schedule import Step, schedule
from sbp_planner.choice.tables import first_least

#: Sweeps without a better bound after which the prices go back to the best, and move less.
_PATIENCE = 8

#: What a strategy may cost more to count for a third as much, as a part of the bound a node.
_SOFTNESS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReducedCosts:
    """By how much choices put the bound up; all >= 0 but for rounding.

    Args:
        nodes: By column, float64.
        pairs: By entry of the flat tables, float64; `inf` where forbidden.
        bound: What they are added to: no assignment with the choice costs less than both together.
    """

    nodes: Floats
    pairs: Floats
    bound: float


class DualAscent:
    """Messages and prices of a problem.

    Attributes:
        bound: The best bound so far.
        prices: λ at the bound so far, float64 of shape (rows,), in cost a byte.
        price: λ now.
        last_bound: The bound of the last sweep.
    """

    def __init__(self, compact: Compact) -> None:
        self.compact = compact
        self.schedule = schedule(compact)
        self.bound = self.last_bound = -inf
        self.price = np.zeros(len(compact.capacity))
        self.prices = self.price
        self._step = 0.5
        self._worse = 0
        self._direction = np.zeros(len(compact.capacity))
        self._early = np.zeros(len(self.schedule.early_column))  # messages to the earlier ends
        self._late = np.zeros(len(self.schedule.late_column))
        self._total = compact.cost  # θ' of all columns
        self._least_edge = np.zeros(len(compact.edges))

    def _own(self) -> Floats:
        """Return the costs of all columns with their bytes at present prices."""
        compact = self.compact
        if not len(self.price):
            return compact.cost
        before = np.concatenate([[0.0], np.cumsum(self.price)])
        paid = compact.held_bytes * (before[compact.held_end] - before[compact.held_first])
        return compact.cost + np.bincount(
            compact.held_column, paid, minlength=len(compact.cost)
        ).astype(np.float64)

    def sweep(self) -> None:
        """Sweep ahead and back, and raise the bound if it is higher."""
        plan, compact = self.schedule, self.compact
        own = self._own()
        total = (
            own
            + np.bincount(plan.early_column, self._early, minlength=len(own))
            + np.bincount(plan.late_column, self._late, minlength=len(own))
        )
        for step in plan.ahead:
            self._send(step, total, self._early, self._late)
        bound = compact.constant - float(self.price @ compact.capacity)
        for step in plan.back:
            least = self._send(step, total, self._late, self._early)
            self._least_edge[step.edges] = least
            bound += float(least.sum())
        self._total = total
        if compact.num_nodes:
            least = np.minimum.reduceat(total, compact.first[:-1])
            bound += float(((1 - plan.behind * plan.share) * least).sum())
        self.last_bound = bound
        if bound > self.bound:
            self.bound = bound
            self.prices = self.price

    def _send(self, step: Step, total: Floats, heard: Floats, said: Floats) -> Floats:
        """Send the messages of a step; return what was moved out of each edge."""
        part = total[step.from_column] * step.from_share - heard[step.heard]
        message = np.minimum.reduceat(part[step.arc_from] + step.arc_cost, step.arc_first)
        least: Floats = np.minimum.reduceat(message, step.to_first)
        message -= np.repeat(least, step.to_length)
        np.add.at(total, step.to_column, message - said[step.said])
        said[step.said] = message
        return least

    def decode(self) -> Ints:
        """Return an assignment by present messages; it may take forbidden pairs, or not fit.

        Returns:
            Strategy of each node, int64: the best for what nodes before it took.
        """
        plan, compact = self.schedule, self.compact
        flat = compact.flat
        choice = self._own() + np.bincount(
            plan.early_column, self._early, minlength=len(compact.cost)
        )
        values = np.zeros(compact.num_nodes, dtype=np.int64)
        for level in plan.levels:
            lengths = compact.sizes[level.nodes]
            values[level.nodes] = first_least(choice[level.columns], level.first, lengths)
            taken = np.repeat(values[level.from_node], level.to_length)
            choice_of = flat.entries[level.entry + taken * level.stride]
            np.add.at(choice, level.to_column, np.minimum(choice_of, compact.arcs.forbidden))
        return values

    def move_prices(self, best_cost: float) -> None:
        """Raise the prices of rows that exceed their capacity, and lower those with room (Polyak).

        Args:
            best_cost: Of the best assignment known; `inf` if none is.
        """
        if not len(self.price):
            return
        self._direction = 0.7 * self._direction + 0.3 * self._excess(best_cost)
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

    def _excess(self, best_cost: float) -> Floats:
        """Return the bytes above capacity of each row, by the soft minima of the nodes."""
        compact, total = self.compact, self._total
        level = abs(best_cost if best_cost < inf else self.bound)
        softness = max(_SOFTNESS * level / compact.num_nodes, 1e-300)
        above = total - np.repeat(np.minimum.reduceat(total, compact.first[:-1]), compact.sizes)
        weight = np.exp(-np.minimum(above / softness, 700.0))
        weight /= np.repeat(np.add.reduceat(weight, compact.first[:-1]), compact.sizes)
        weight[weight < 1e-3] = 0.0
        excess: Floats = compact.profile(weight) - compact.capacity
        return excess

    def restart_prices(self) -> None:
        """Go on from the best prices, with larger moves again."""
        self.price = self.prices
        self._step = max(self._step, 0.05)

    def reduced_costs(self) -> ReducedCosts:
        """Return by how much a strategy, or a pair, puts the bound up; to be called after a sweep.

        A pair counts both of its strategies, a strategy its cheapest pair of each edge.
        """
        compact, plan, flat = self.compact, self.schedule, self.compact.flat
        columns = [flat.columns(compact.first, end) for end in (0, 1)]
        # Where a node is the later end of an edge, it put its share into it in the sweep back.
        share = np.repeat(plan.share, compact.sizes) * self._total
        sizes = np.diff(flat.first)
        pairs = flat.entries - np.repeat(self._least_edge, sizes)
        late = np.repeat(plan.swapped, sizes)
        pairs += np.where(late, share[columns[0]], share[columns[1]])
        early, later = plan.message_places
        pairs -= self._early[early] + self._late[later]
        behind = np.repeat(plan.behind * plan.share, compact.sizes)
        least = np.repeat(np.minimum.reduceat(self._total, compact.first[:-1]), compact.sizes)
        nodes = (1 - behind) * self._total
        nodes -= (1 - behind) * least
        nodes = nodes + plan.least_by_column(pairs)
        np.maximum(pairs, nodes[columns[0]], out=pairs)
        np.maximum(pairs, nodes[columns[1]], out=pairs)
        return ReducedCosts(nodes=nodes, pairs=pairs, bound=self.last_bound)
