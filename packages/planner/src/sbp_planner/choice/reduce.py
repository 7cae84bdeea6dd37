"""Reduce a choice problem to a smaller one of the same least cost, before the solver searches it.

Applied until none applies any more (or the time is up, which leaves a larger, but valid problem):

    forbidden    a strategy that some neighbour cannot answer is dropped
    shift        the least cost of each row and column of an edge moves to its nodes; an edge with
                 nothing left is dropped (it was a sum of two node costs)
    single       a node with one strategy is merged into its neighbours
    follow       if each strategy of a neighbour allows only one of a node, the node is merged into
                 that neighbour, with memory and edges (tied nodes, "follow chains" of operators)
    eliminate    a node without memory, of degree 0, 1 or 2, is replaced by the minimum over it
    dominated    a strategy is dropped if another costs no more whatever the neighbours take, and
                 holds no more bytes at any time
    pair         a strategy that is dominated only given one strategy of one neighbour is forbidden
                 with it; often only one is left for each, and the node follows
    rows         times at which all choices together fit are dropped
    misfit       a strategy is dropped if it does not fit even with the least bytes of all others

    before  a --- b --- c        after  a === c     b eliminated
                  |                                 d has for each strategy of b a best one: follows
                  d

Source: Dechter, "Bucket elimination", Artificial Intelligence 113 (1999); Jia et al., ICML 2018,
section 5 (elimination of nodes and edges); Goldstein, "Efficient rotamer elimination", Biophysical
Journal 66 (1994) (dominated strategies, there of protein side chains).
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from sbp_planner.choice.problem import ChoiceProblem, Floats
from sbp_planner.choice.reduced_graph import Graph, Indices

#: The indices s and t of pairs of strategies of one node.
Places = tuple[Indices, ...]

#: Above these, dominance is not looked for: the comparison would cost more than it gains.
_MAX_DEGREE = 24
_MAX_PAIR_DEGREE = 4
_MAX_COMPARED = 1 << 20

#: Nodes of larger degree wait until all others are done, because each of these may change them.
_HUB = 16


def reduce_problem(problem: ChoiceProblem, deadline: float) -> Graph:
    """Return the reduced graph of a problem.

    Args:
        problem: The problem.
        deadline: Time of `time.monotonic` at which the reduction ends early, in s.

    Raises:
        NothingAllowedError: If no assignment is allowed.
    """
    graph = Graph(problem)
    leaders = list(range(problem.num_nodes))

    def root(node: int) -> int:
        """Return the node that represents a tied node."""
        while leaders[node] != node:
            node = leaders[node]
        return node

    for tie in problem.ties:
        for node in tie[1:]:
            leader, follower = root(tie[0]), root(node)
            if leader != follower:
                leaders[follower] = leader
                graph.follow(follower, leader, np.arange(len(graph.cost[leader])))
    _Reduction(graph, deadline).run()
    return graph


def reduce_further(
    graph: Graph,
    strategies: dict[int, NDArray[np.bool_]],
    pairs: dict[tuple[int, int], NDArray[np.bool_]],
    deadline: float,
) -> Graph:
    """Return a reduced copy of a graph, with more choices forbidden.

    Args:
        graph: The graph, already reduced.
        strategies: For each node, which strategies are allowed.
        pairs: For each edge, which pairs are allowed, of shape (strategies of both).
        deadline: Time of `time.monotonic` at which the reduction ends early, in s.

    Raises:
        NothingAllowedError: If no assignment is allowed any more.
    """
    graph = graph.copy()
    for (u, v), allowed in pairs.items():
        graph.set_edge(u, v, np.where(allowed, graph.tables[u][v], np.inf))
    for node, allowed in strategies.items():
        graph.cost[node] = np.where(allowed, graph.cost[node], np.inf)
    _Reduction(graph, deadline).run()
    return graph


class _Reduction:
    def __init__(self, graph: Graph, deadline: float) -> None:
        self.graph = graph
        self.deadline = deadline
        self.queue = deque(range(len(graph.cost)))
        self.hubs: deque[int] = deque()
        self.queued = [True] * len(graph.cost)

    def push(self, *nodes: int) -> None:
        """Queue nodes to be looked at again."""
        for node in nodes:
            if not self.queued[node] and self.graph.alive[node]:
                self.queued[node] = True
                small = len(self.graph.tables[node]) <= _HUB
                (self.queue if small else self.hubs).append(node)

    def run(self) -> None:
        """Apply the reductions until none applies or time is up."""
        # Strategies that do not fit need not be compared.
        while time.monotonic() < self.deadline and self._look_at_memory():
            pass
        while True:
            while (self.queue or self.hubs) and time.monotonic() < self.deadline:
                node = (self.queue or self.hubs).popleft()
                self.queued[node] = False
                if self.graph.alive[node]:
                    self._visit(node)
            if time.monotonic() >= self.deadline or not self._look_at_memory():
                break
        # Solvers rely on finite remaining costs, even if the time was up.
        for node, alive in enumerate(self.graph.alive):
            if alive and self.graph.cost[node].max() == np.inf:
                self.graph.keep(node, np.flatnonzero(self.graph.cost[node] < np.inf))
        if self.graph.limit is not None:
            self.graph.drop_slack_rows()

    def _look_at_memory(self) -> bool:
        """Drop rows that always fit, and strategies that never do; return whether there was any."""
        graph = self.graph
        if graph.limit is None:
            return False
        touched = graph.drop_slack_rows()
        self.push(*touched)
        misfits = graph.misfits()
        for node, kept in misfits:
            self._keep(node, kept)
        return bool(touched or misfits)

    def _visit(self, node: int) -> None:
        """Apply the first reduction that applies to a node; it is queued again if one did."""
        graph, tables = self.graph, self.graph.tables[node]
        allowed = graph.cost[node] < np.inf
        for other in graph.changed[node]:
            if other in tables:
                allowed &= tables[other].min(axis=1) < np.inf
        if not allowed.all():
            self._keep(node, np.flatnonzero(allowed))
            return
        if self._shift(node):
            return
        neighbours, size = tuple(tables), len(graph.cost[node])
        widths = [table.shape[1] for table in tables.values()]
        # For a node of degree 2, the table that replaces it must not be much larger.
        if not graph.spans[node] and (
            len(widths) <= 1
            or (len(widths) == 2 and widths[0] * widths[1] <= 2 * size * (widths[0] + widths[1]))
        ):
            graph.eliminate(node)
            self.push(*neighbours)
        elif size == 1:
            # Its cost goes to its neighbours; its memory is in the base already.
            for other in neighbours:
                graph.cost[other] = graph.cost[other] + graph.tables[node][other][0]
                graph.drop_edge(node, other)
            graph.eliminate(node)
            self.push(*neighbours)
        elif len(widths) <= _MAX_DEGREE:
            self._drop_dominated(node)

    def _keep(self, node: int, kept: Indices) -> None:
        self.graph.keep(node, kept)
        self.push(node, *self.graph.tables[node])

    def _shift(self, node: int) -> bool:
        """Move costs of changed edges to their nodes; merge the node if its edge allows it."""
        graph = self.graph
        changed, graph.changed[node] = graph.changed[node], set()
        leader: tuple[int, Indices] | None = None
        for other in changed:
            if other not in graph.tables[node]:
                continue
            table = graph.tables[node][other]
            columns = table.min(axis=0)
            if columns.max() == np.inf:
                # The other end drops strategies first; then this edge is looked at again.
                self.push(other)
                continue
            if columns.any():
                table = table - columns
                graph.cost[other] = graph.cost[other] + columns
                self.push(other)
            rows = table.min(axis=1)
            if rows.any():
                table = table - rows[:, None]
                graph.cost[node] = graph.cost[node] + rows
            if not table.any():
                graph.drop_edge(node, other)
                self.push(node, other)
                continue
            graph.tables[node][other], graph.tables[other][node] = table, table.T
            graph.changed[other].discard(node)
            strategies = _decided(table)
            is_back = _decided(table.T) is not None
            # If either node may follow, the one with fewer edges to move does.
            is_fewer = len(graph.tables[node]) <= len(graph.tables[other])
            if strategies is not None and (is_fewer or not is_back):
                leader = other, strategies
            elif is_back:
                # The other end follows in its turn.
                graph.changed[other].add(node)
                self.push(other)
        if leader is None:
            return False
        neighbours = tuple(graph.tables[node])
        graph.follow(node, *leader)
        self.push(*neighbours)
        return True

    def _drop_dominated(self, node: int) -> None:
        """Drop dominated strategies of a node; if there are none, forbid dominated pairs."""
        graph = self.graph
        cost, tables = graph.cost[node], graph.tables[node]
        size = len(cost)
        if size * size > _MAX_COMPARED:
            return
        # fits[s, t]: t holds no more bytes than s at any time.
        fits = ~np.eye(size, dtype=bool)
        for usage in graph.spans[node].values():
            fits &= usage[None, :] <= usage[:, None]
        if not fits.any():
            return
        # least[s, t]: what t in place of s adds where s is cheapest; the most it adds is no less.
        own = cost[None, :] - cost[:, None]
        least = {other: _least_differences(table) for other, table in tables.items()}
        places = np.nonzero(fits & (own + sum(least.values()) <= 0))
        if self._is_small(places, tables):
            # added: the most that t in place of s may add.
            most = [_differences(table, places).max(axis=1) for table in tables.values()]
            added = own[places] + sum(most)
            beaten = _beaten(places, (added <= 0)[:, None], size)[:, 0]
            if beaten.any():
                self._keep(node, np.flatnonzero(~beaten))
                return
        if len(tables) > _MAX_PAIR_DEGREE:
            return
        near = np.zeros_like(fits)
        for other, table in tables.items():
            # Given one strategy of the neighbour, t saves at most the cost of s there.
            saved = np.where(table < np.inf, table, -np.inf).max(axis=1) - table.min()
            rest = own + sum(low for beside, low in least.items() if beside != other)
            near |= rest <= saved[:, None]
        places = np.nonzero(fits & near)
        if not self._is_small(places, tables):
            return
        differences = {other: _differences(table, places) for other, table in tables.items()}
        highest = {other: difference.max(axis=1) for other, difference in differences.items()}
        for other, table in list(tables.items()):
            rest = own[places] + sum(high for beside, high in highest.items() if beside != other)
            allowed = table < np.inf
            with np.errstate(invalid="ignore"):  # NaN from inf - inf is not below 0
                better = (rest[:, None] + differences[other] <= 0) & allowed[places[0]]
            if not better.any():
                continue
            pairs = _beaten(places, better, size)
            graph.set_edge(node, other, np.where(pairs, np.inf, table))
            self.push(node, other)
            return

    def _is_small(self, places: Places, tables: dict[int, Floats]) -> bool:
        """Return whether there are pairs to compare, and not too many."""
        widest = max((table.shape[1] for table in tables.values()), default=1)
        return 0 < len(places[0]) * widest <= _MAX_COMPARED


def _decided(table: Floats) -> Indices | None:
    """Return the one strategy that each strategy of the neighbour allows; None if not unique."""
    allowed = table < np.inf
    return allowed.argmax(axis=0) if (allowed.sum(axis=0) == 1).all() else None


def _least_differences(table: Floats) -> Floats:
    """Return at [s, t] the cost of t minus that of s, for the neighbour's cheapest with s."""
    cheapest = table.argmin(axis=1)
    least: Floats = table[:, cheapest].T - table[np.arange(len(table)), cheapest][:, None]
    return least


def _differences(table: Floats, places: Places) -> Floats:
    """Return at [n, r] the cost of t minus that of s, given r, for the n-th (s, t) of `places`.

    It is -inf where s is forbidden.
    """
    before = table[places[0]]
    with np.errstate(invalid="ignore"):
        difference = table[places[1]] - before
    difference[before == np.inf] = -np.inf
    return difference


def _beaten(places: Places, better: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """Return at [s, r] whether some t dominates s, given r; of equal strategies the first stays.

    Args:
        places: The compared pairs of s, rising, and t.
        better: Whether t is at least as good, of shape (places, r).
        size: Number of strategies.
    """
    beaten = np.zeros((size, better.shape[1]), dtype=bool)
    if not len(places[0]):
        return beaten
    number = np.full((size, size), -1, dtype=np.int64)
    number[places] = np.arange(len(places[0]))
    back = number[places[1], places[0]]
    equal = better & (back >= 0)[:, None] & better[back]
    better = better & ~(equal & (places[1] > places[0])[:, None])
    starts = np.flatnonzero(np.diff(places[0], prepend=-1))
    beaten[places[0][starts]] = np.logical_or.reduceat(better, starts, axis=0)
    return beaten
