"""Compute lower bounds on the cost of a large choice problem, by passing messages along its edges.

`large_search` repeats this. Each sweep gives an assignment, too, and bounds rule out strategies.

Memory rows are priced: with a price λ_t >= 0 for each byte above the capacity of row t,

    L(λ) = min over s of  cost(s) + sum_t λ_t (bytes_t(s) - capacity_t)     <=  the least cost

The remaining problem has only costs of nodes θ_i and of edges θ_uv. Messages M move cost between a
node and its edges, which changes no total:

    θ'_i = θ_i + sum_j M_ji          θ'_ij = θ_ij - M_ij - M_ji

so the sum of all minima is a bound, for any M. A sweep visits the nodes in order; each sends its
cost, in equal parts, over the edges ahead (TRW-S):

    sweep ahead       1 --> 2 --> 3 --> 4        each node also takes a strategy: the best, given
    sweep back        1 <-- 2 <-- 3 <-- 4        the earlier nodes and the messages of later ones

Any order of the nodes will do. Nodes that no path of rising order joins are visited together, in
one step of numpy. With an order, a node's *level* is the longest path of rising order to it:

    order   1 --> 4 --> 5         levels   0  1  2      one step for each level, whatever its width
            2 --> 3 -----^                 0  1

The prices follow the bytes of the best strategies of the nodes by θ'. Each strategy has a weight
that falls with its extra cost (a *soft* minimum). So strategies that are nearly as good count as
well, which spares the prices most of the zigzag of plain subgradients.

A strategy or pair whose minimum in that sum raises the bound above the cost of a known assignment
is in no better assignment, so it is forbidden (*pruned*).

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", IEEE
Transactions on Pattern Analysis and Machine Intelligence 28 (2006), section 4; Held, Wolfe and
Crowder, "Validation of subgradient optimization", Mathematical Programming 6 (1974) (the prices);
Nesterov, "Smooth minimization of non-smooth functions", Mathematical Programming 103 (2005) (soft
minima); Cooper et al., "Soft arc consistency revisited", Artificial Intelligence 174 (2010)
(pruning).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import numpy as np

from sbp_planner.choice.compact import Compact, EdgeColumns, Mask, Messages, first_least, ragged
from sbp_planner.choice.problem import Floats, Ints

#: After so many sweeps without a better bound, the prices go back to the best, and move less.
_PATIENCE = 8

#: The extra cost at which a strategy's weight is 1 / e, as a part of the bound for each node.
_SOFTNESS = 0.01

#: Approximate seconds of numpy for a step without its arcs, and for an arc.
_STEP_S = 150e-6
_ARC_S = 20e-9

#: Fewer levels than this are no better.
_FEW_LEVELS = 24


class ReducedCosts(NamedTuple):
    """The amount by which choices raise the bound; all >= 0 up to rounding.

    Args:
        nodes: For each column, float64.
        pairs: For each entry of the flat tables, float64; `inf` where forbidden.
        bound: The bound: no assignment with a choice costs less than bound + reduced cost.
    """

    nodes: Floats
    pairs: Floats
    bound: float

    def room_for(self, cost: float, few: int) -> tuple[float, float, int]:
        """Return the largest c for which few enough pairs are left.

        Args:
            cost: Cost of the best known assignment, an upper limit of c; `inf` if none is known.
            few: How many pairs may be left.

        Returns:
            c, the reduced cost up to which strategies and pairs are left for it, and their number
            of pairs.
        """
        every = self.pairs[self.pairs < inf]
        room = cost - self.bound
        if few < len(every):
            room = min(room, float(np.partition(every, few)[few]))
        below = min(self.bound + room, cost)
        # Rounding may not forbid choices of exactly this cost.
        room += 1e-9 * (abs(self.bound) + abs(room)) if room < inf else 0.0
        return below, room, int((every <= room).sum())

    def left(self, compact: Compact, room: float, values: Ints) -> tuple[list[Mask], list[Mask]]:
        """Return the strategies of each node and pairs of each edge that are not pruned.

        The present assignment is always left, so that the program has a solution.

        Args:
            compact: The problem.
            room: Reduced cost up to which they are left: assignments that cost at most this much
                above the bound take no others.
            values: The present assignment.
        """
        nodes, pairs = self.nodes <= room, self.pairs <= room
        nodes[compact.first[:-1] + values] = True
        pairs[compact.flat.chosen(values)] = True
        return compact.split(nodes, pairs)


class MessagePass(NamedTuple):
    """Messages over some edges, all in one direction.

    Args:
        edges: Numbers of the edges.
        messages: The messages over them.
        from_share: For each column of the senders, the part of its cost that is sent.
        heard: Indices of the last messages over the same edges in the other direction.
        said: Indices of the messages to the receivers.
        to_first, to_length: First index and number of the receivers' strategies of each edge.
    """

    edges: Ints
    messages: Messages
    from_share: Floats
    heard: Ints
    said: Ints
    to_first: Ints
    to_length: Ints


class NodeLevel(NamedTuple):
    """Nodes that take their strategies at the same time.

    Args:
        nodes: The nodes.
        columns, first: Their columns, and the first of each node.
        ahead: The columns of later nodes on the edges ahead.
    """

    nodes: Ints
    columns: Ints
    first: Ints
    ahead: EdgeColumns


class Schedule(NamedTuple):
    """Steps of a sweep.

    There are two flat arrays of messages, in edge order: to the earlier ends of the edges, and to
    the later ends.

    Args:
        swapped: Whether the first end of an edge is the later one.
        behind: For each node, its number of edges to earlier nodes.
        share: The part of a node's cost that goes over each edge.
        early_column, late_column: The receiving column of each message.
        ahead, back: The steps of both sweeps.
        levels: The steps of taking an assignment.
    """

    swapped: Mask
    behind: Ints
    share: Floats
    early_column: Ints
    late_column: Ints
    ahead: list[MessagePass]
    back: list[MessagePass]
    levels: list[NodeLevel]


def schedule(compact: Compact) -> Schedule:
    """Return the steps of a problem: by the nodes' numbers, or in an order with fewer levels.

    Numbers often follow a long program, one operator after the other. The other order interleaves
    stretches of the program: the first nodes of all stretches, then the second nodes, and so on.
    """
    rank = np.arange(compact.num_nodes)
    few = max(_FEW_LEVELS, int(compact.num_arcs * _ARC_S / _STEP_S))
    if _levels(compact, rank).max(initial=0) > 2 * few:
        rank = np.argsort(np.lexsort((rank, rank % few)))
    ends, count, sizes = compact.flat.ends, compact.num_nodes, compact.sizes
    swapped = rank[ends[:, 0]] > rank[ends[:, 1]]
    early, late = np.where(swapped, ends.T[::-1], ends.T)
    ahead, behind = np.bincount(early, minlength=count), np.bincount(late, minlength=count)
    share = 1.0 / np.maximum(np.maximum(ahead, behind), 1)
    rising = _levels(compact, rank)

    def steps(
        level: Ints, sender: Ints, receiver: Ints, from_second: Mask
    ) -> Iterator[MessagePass]:
        """Yield the steps, given the level of each edge's sender."""
        message = [np.cumsum(sizes[of]) - sizes[of] for of in (sender, receiver)]
        for number in range(int(level.max(initial=-1)) + 1):
            edges = np.flatnonzero(level == number)
            sent, received = sizes[sender[edges]], sizes[receiver[edges]]
            yield MessagePass(
                edges=edges,
                messages=compact.messages(edges, from_second[edges]),
                from_share=np.repeat(share[sender[edges]], sent),
                heard=ragged(message[0][edges], sent),
                said=ragged(message[1][edges], received),
                to_first=np.cumsum(received) - received,
                to_length=received,
            )

    def levels() -> Iterator[NodeLevel]:
        edge_level = rising[early]
        for number in range(int(rising.max(initial=-1)) + 1):
            nodes = np.flatnonzero(rising == number)
            edges = np.flatnonzero(edge_level == number)
            yield NodeLevel(
                nodes=nodes,
                columns=ragged(compact.first[nodes], sizes[nodes]),
                first=np.cumsum(sizes[nodes]) - sizes[nodes],
                ahead=compact.edge_columns(edges, ~swapped[edges]),
            )

    return Schedule(
        swapped=swapped,
        behind=behind,
        share=share,
        early_column=ragged(compact.first[early], sizes[early]),
        late_column=ragged(compact.first[late], sizes[late]),
        ahead=list(steps(rising[early], early, late, swapped)),
        back=list(steps(_levels(compact, -rank)[late], late, early, ~swapped)),
        levels=list(levels()),
    )


def _levels(compact: Compact, rank: Ints) -> Ints:
    """Return the level of each node in rising order."""
    before: list[list[int]] = [[] for _ in range(compact.num_nodes)]
    ranks = rank.tolist()
    for u, v in compact.edges:
        if ranks[u] < ranks[v]:
            before[v].append(u)
        else:
            before[u].append(v)
    level = [0] * compact.num_nodes
    for node in np.argsort(rank, kind="stable").tolist():
        level[node] = max((level[other] + 1 for other in before[node]), default=0)
    return np.array(level, dtype=np.int64)


class DualAscent:
    """Messages and prices of a problem.

    Attributes:
        bound: The best bound so far.
        prices: λ of the best bound, float64 of shape (rows,), in cost a byte.
        price: The present λ.
        last_bound: The bound of the last sweep.
    """

    def __init__(self, compact: Compact) -> None:
        self.compact = compact
        self.schedule = schedule(compact)
        self.bound = self.last_bound = -inf
        self.price = self.prices = np.zeros(len(compact.capacity))
        self._step = 0.5
        self._worse = 0
        self._direction = np.zeros(len(compact.capacity))
        self._early = np.zeros(len(self.schedule.early_column))  # messages to the earlier ends
        self._late = np.zeros(len(self.schedule.late_column))
        self._total = compact.cost  # θ' of all columns
        self._least_edge = np.zeros(len(compact.edges))

    def sweep(self) -> None:
        """Sweep ahead and back, and raise the bound if it is higher."""
        plan, compact = self.schedule, self.compact
        own = compact.priced(self.price)
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

    def _send(self, step: MessagePass, total: Floats, heard: Floats, said: Floats) -> Floats:
        """Send the messages of a step; return the cost that was moved out of each edge."""
        sent = total[step.messages.from_column] * step.from_share - heard[step.heard]
        message = step.messages.least(sent)
        least: Floats = np.minimum.reduceat(message, step.to_first)
        message -= np.repeat(least, step.to_length)
        np.add.at(total, step.messages.to_column, message - said[step.said])
        said[step.said] = message
        return least

    def decode(self) -> Ints:
        """Return an assignment by the present messages; it may have forbidden pairs, or not fit.

        Returns:
            Strategy of each node, int64: the best, given the strategies of earlier nodes.
        """
        plan, compact = self.schedule, self.compact
        choice = compact.priced(self.price) + np.bincount(
            plan.early_column, self._early, minlength=len(compact.cost)
        )
        values = np.zeros(compact.num_nodes, dtype=np.int64)
        for nodes, columns, first, ahead in plan.levels:
            values[nodes] = first_least(choice[columns], first, compact.sizes[nodes])
            costs = np.minimum(ahead.costs(compact.flat.entries, values), compact.arcs.forbidden)
            np.add.at(choice, ahead.column, costs)
        return values

    def move_prices(self, best_cost: float) -> None:
        """Raise the prices of rows that exceed their capacity, and lower those with room (Polyak).

        Args:
            best_cost: Cost of the best known assignment; `inf` if none is known.
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
        weight = np.exp(-np.minimum((total - compact.least(total)) / softness, 700.0))
        weight /= np.repeat(np.add.reduceat(weight, compact.first[:-1]), compact.sizes)
        weight[weight < 1e-3] = 0.0
        excess: Floats = compact.profile(weight) - compact.capacity
        return excess

    def restart_prices(self) -> None:
        """Go on from the best prices, with larger moves again."""
        self.price = self.prices
        self._step = max(self._step, 0.05)

    def reduced_costs(self) -> ReducedCosts:
        """Return by how much each strategy or pair raises the bound; to be called after a sweep.

        A pair includes both of its strategies; a strategy includes its cheapest pair of each edge.
        """
        compact, plan, flat = self.compact, self.schedule, self.compact.flat
        sizes, columns = np.diff(flat.first), [flat.columns(compact.first, end) for end in (0, 1)]
        # In the sweep back, a node put its share into each edge of which it is the later end.
        share = np.repeat(plan.share, compact.sizes) * self._total
        swapped = np.repeat(plan.swapped, sizes)
        pairs = flat.entries - np.repeat(self._least_edge, sizes)
        pairs += np.where(swapped, share[columns[0]], share[columns[1]])
        # For each entry, the indices of the messages to both of its ends.
        early, late = np.where(plan.swapped, flat.ends.T[::-1], flat.ends.T)
        places = np.where(
            swapped, (flat.places(1), flat.places(0)), (flat.places(0), flat.places(1))
        )
        messages = (self._early, self._late)
        for count, place, message in zip(
            (compact.sizes[early], compact.sizes[late]), places, messages, strict=True
        ):
            place += np.repeat(np.cumsum(count) - count, sizes)
            pairs -= message[place]
        behind = np.repeat(plan.behind * plan.share, compact.sizes)
        nodes = (1 - behind) * (self._total - compact.least(self._total))
        for place, column in zip(places, (plan.early_column, plan.late_column), strict=True):
            least = np.full(len(column), inf)
            np.minimum.at(least, place, pairs)
            np.add.at(nodes, column, least)
        np.maximum(pairs, nodes[columns[0]], out=pairs)
        np.maximum(pairs, nodes[columns[1]], out=pairs)
        return ReducedCosts(nodes=nodes, pairs=pairs, bound=self.last_bound)
