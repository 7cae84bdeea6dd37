"""A choice problem: one strategy for each node, least total cost, within a memory limit over time.

    minimise    sum_i cost_i(s_i) + sum_(u,v) edge_cost_uv(s_u, s_v)
    such that   sum of usage_i(s_i) over the nodes live at t  <=  usage_limit      for every time t
                s_i = s_j                                            for i and j of one tie

This is the problem of intra-operator parallelism: a node is an operator (or a tensor), a strategy
one way to split it, an edge the boxing between two of them. This module defines the problem and the
cost of an assignment; it solves nothing.

Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep
Learning", OSDI 2022, section 4.2; the contest of ASPLOS 2025, "Intra-Operator Parallelism for
Distributed Deep Learning", the origin of the words node, strategy, usage and interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, inf, isinf, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import SbpValueError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Sums of usages below this are exact in int64.
_MAX_TOTAL_USAGE = 1 << 62

#: The last possible time: the largest int64.
_LATEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceProblem:
    """Nodes with strategies, edges with cost matrices, and a limit of memory.

    Args:
        costs: For each node the cost of each of its strategies, one or more; float64, `inf`
            forbids.
        usages: For each node the bytes that each strategy holds while the node lives, >= 0; None if
            no memory is counted. May be Python ints of any size.
        intervals: For each node its half-open lifetime (start, end), >= 0; empty if start >= end.
            None: every node lives in (0, 1), so that all count at once.
        edges: Pairs of nodes; a pair may occur several times, and a node may be paired with itself.
        edge_costs: For each edge its costs, float64 of shape (strategies of u, strategies of v);
            `inf` forbids.
        usage_limit: Bytes that all live nodes together may hold at any time; None: no limit.
        ties: Groups of nodes that take the same strategy index; all have equally many strategies.
        name: Name of the problem, for messages.
    """

    costs: Sequence[Floats]
    usages: Sequence[Ints] | None = None
    intervals: Sequence[tuple[int, int]] | None = None
    edges: Sequence[tuple[int, int]] = ()
    edge_costs: Sequence[Floats] = ()
    usage_limit: float | None = None
    ties: Sequence[Sequence[int]] = ()
    name: str = "choice problem"

    def __post_init__(self) -> None:
        def put(name: str, values: object) -> None:
            object.__setattr__(self, name, values)

        count = len(self.costs)
        put("costs", tuple(self._table(f"costs[{i}]", c, 1) for i, c in enumerate(self.costs)))
        for i, size in enumerate(self.sizes):
            if size == 0:
                raise self._error(f"node {i} has no strategy", "one or more strategies a node")
        if len(self.edges) != len(self.edge_costs):
            what = f"{len(self.edges)} edges and {len(self.edge_costs)} edge_costs"
            raise self._error(what, "as many of both")
        tables = []
        for n, (pair, values) in enumerate(zip(self.edges, self.edge_costs, strict=True)):
            if len(pair) != 2 or not all(0 <= node < count for node in pair):
                accepted = f"two nodes, each from 0 to {count - 1}"
                raise self._error(f"edges[{n}] is {pair!r}", accepted)
            table, (u, v) = self._table(f"edge_costs[{n}]", values, 2), pair
            shape = len(self.costs[u]), len(self.costs[v])
            if table.shape != shape:
                raise self._error(
                    f"edge_costs[{n}], of edge {(u, v)}, has shape {table.shape}",
                    f"shape {shape}: strategies of the two nodes",
                )
            tables.append(table)
        put("edges", tuple((int(u), int(v)) for u, v in self.edges))
        put("edge_costs", tuple(tables))
        for name, of in (("intervals", self.intervals), ("usages", self.usages)):
            if of is not None and len(of) != count:
                raise self._error(f"{len(of)} {name} and {count} nodes", "as many of both")
        intervals = []
        for i, interval in enumerate(self.intervals or [(0, 1)] * count):
            if len(interval) != 2 or min(interval) < 0 or max(interval) > _LATEST:
                accepted = f"a pair (start, end) of times from 0 to {_LATEST}"
                raise self._error(f"intervals[{i}] is {interval!r}", accepted)
            start, end = int(interval[0]), int(interval[1])
            intervals.append((start, end) if start < end else (0, 0))
        put("intervals", tuple(intervals))
        self._put_usages(put)
        for n, tie in enumerate(self.ties):
            if not all(0 <= node < count for node in tie):
                raise self._error(f"ties[{n}] is {tie!r}", f"nodes from 0 to {count - 1}")
            counts = [len(self.costs[node]) for node in tie]
            if len(set(counts)) > 1:
                what = f"the nodes of ties[{n}], {tuple(tie)}, have {counts} strategies"
                raise self._error(what, "equally many strategies")
        put("ties", tuple(tuple(int(node) for node in tie) for tie in self.ties))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.costs)

    @property
    def sizes(self) -> list[int]:
        """Number of strategies of each node."""
        return [len(cost) for cost in self.costs]

    def _error(self, what: str, accepted: str) -> SbpValueError:
        return SbpValueError(what, where=self.name, accepted=accepted)

    def _table(self, key: str, values: Any, ndim: int) -> Floats:
        try:
            table: Floats = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._error(f"{key} is {values!r:.80}", "numbers") from error
        if table.ndim != ndim:
            raise self._error(f"{key} has shape {table.shape}", f"{ndim} dims")
        # The minimum is NaN if some entry is.
        if table.size and not table.min() > -inf:
            raise self._error(f"{key} has the cost NaN or -inf", "finite numbers, or inf to forbid")
        return table

    def _put_usages(self, put: Callable[[str, object], None]) -> None:
        """Check the usages, and make all their sums, and the limit, fit int64."""
        limit = self.usage_limit
        if limit is not None and isnan(limit):
            raise self._error("usage_limit is NaN", "bytes, or None for no limit")
        if self.usages is None:
            put("usage_limit", None if limit is None or limit >= 0 else limit)
            return
        usages = [self._usage(i, own) for i, own in enumerate(self.usages)]
        if limit is None or limit == inf:
            put("usage_limit", None)
            put("usages", tuple(usages))
            return
        whole = -1 if limit == -inf else floor(limit)
        total = sum(int(own.max()) for own in usages)
        if total > _MAX_TOTAL_USAGE:
            # All usages above the limit are equally bad.
            most = min(max(whole, 0) + 1, _MAX_TOTAL_USAGE)
            usages = [np.minimum(own, most) for own in usages]
            total = sum(int(own.max()) for own in usages)
        whole = min(whole, total)
        if total > _MAX_TOTAL_USAGE:
            # For exabytes, low bits are dropped: usages are rounded up and the limit down.
            bits = total.bit_length() - _MAX_TOTAL_USAGE.bit_length() + 1
            usages = [-(-own >> bits) for own in usages]
            whole >>= bits
        put("usage_limit", whole)
        put("usages", tuple(usages))

    def _usage(self, i: int, own: Any) -> Ints:
        if len(own) != len(self.costs[i]):
            raise self._error(
                f"usages[{i}] has {len(own)} entries and costs[{i}] has {len(self.costs[i])}",
                "as many of both",
            )
        array = np.asarray(own)
        if array.dtype.kind not in "iu" or int(array.max()) > _MAX_TOTAL_USAGE:
            try:
                # Larger values are equivalent: no limit that can bind is so large.
                whole = [int(min(value, _MAX_TOTAL_USAGE)) for value in own]
                odd = [v for v in own if v < _MAX_TOTAL_USAGE and v != int(v)]
            except (TypeError, ValueError) as error:
                what = f"usages[{i}] is {own!r:.80}"
                raise self._error(what, "whole numbers of bytes") from error
            if odd:
                raise self._error(f"usages[{i}] has {odd[0]!r}", "whole numbers of bytes")
            array = np.asarray(whole, dtype=np.int64)
        if array.min() < 0:
            raise self._error(f"usages[{i}] has {array.min()}", "bytes >= 0")
        return array.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentCost:
    """The cost of an assignment.

    Args:
        cost: Total of nodes and edges; `inf` if something forbidden is chosen, a tie broken, or the
            limit of memory exceeded.
        peak_usage: Most bytes held at any time.
        peak_time: The first time at which so many are held; 0 if nothing is held.
        reason: Why the cost is `inf`; empty if it is finite.
    """

    cost: float
    peak_usage: int
    peak_time: int
    reason: str = ""

    @property
    def feasible(self) -> bool:
        """Whether the assignment is allowed and fits."""
        return not self.reason


def evaluate(problem: ChoiceProblem, assignment: Sequence[int]) -> AssignmentCost:
    """Return cost and memory of an assignment.

    Args:
        problem: The problem.
        assignment: A strategy index for each node.

    Raises:
        SbpValueError: If the assignment is not one strategy for each node.
    """
    what, accepted = "", ""
    if len(assignment) != problem.num_nodes:
        what, accepted = f"{len(assignment)} entries", f"{problem.num_nodes}, one for each node"
    for i, (strategy, size) in enumerate(zip(assignment, problem.sizes, strict=False)):
        if not 0 <= strategy < size and not what:
            what, accepted = f"strategy {strategy} for node {i}", f"0 to {size - 1}"
    if what:
        raise SbpValueError(f"the assignment has {what}", where=problem.name, accepted=accepted)
    node_cost = sum(float(c[s]) for c, s in zip(problem.costs, assignment, strict=True))
    edge_cost = sum(
        float(c[assignment[u], assignment[v]])
        for (u, v), c in zip(problem.edges, problem.edge_costs, strict=True)
    )
    time, usage = _peak(problem, assignment)
    reason = ""
    if isinf(node_cost + edge_cost):
        reason = "a forbidden strategy, or pair of strategies, is chosen"
    elif problem.usage_limit is not None and usage > problem.usage_limit:
        reason = f"{usage} bytes are held at time {time}, the limit is {problem.usage_limit}"
    elif broken := [tie for tie in problem.ties if len({assignment[i] for i in tie}) > 1]:
        reason = f"the tied nodes {broken[0]} take different strategies"
    cost = inf if reason else node_cost + edge_cost
    return AssignmentCost(cost=cost, peak_usage=usage, peak_time=time, reason=reason)


def whole_cost(problem: ChoiceProblem, assignment: Sequence[int]) -> int | None:
    """Return the cost of an allowed assignment with all of its digits, if costs are whole.

    Sums beyond 2^53 are exact, while `evaluate` rounds them; None if some cost has a fraction.

    Args:
        problem: The problem.
        assignment: A strategy index for each node, without forbidden choices.
    """
    chosen = [cost[strategy] for cost, strategy in zip(problem.costs, assignment, strict=True)]
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        chosen.append(table[assignment[u], assignment[v]])
    return sum(map(int, chosen)) if all(cost.is_integer() for cost in chosen) else None


def _peak(problem: ChoiceProblem, assignment: Sequence[int]) -> tuple[int, int]:
    """Return the first time of the peak usage, and that usage."""
    if problem.usages is None or not problem.costs:
        return 0, 0
    assert problem.intervals is not None
    held = np.array([own[s] for own, s in zip(problem.usages, assignment, strict=True)])
    spans = np.array(problem.intervals, dtype=np.int64)
    live = spans[:, 0] < spans[:, 1]
    # Usage changes where a node is born or dies: +usage at the start, -usage at the end.
    times = np.concatenate([spans[live, 0], spans[live, 1]])
    steps = np.concatenate([held[live], -held[live]])
    points, place = np.unique(times, return_inverse=True)
    if not len(points):
        return 0, 0
    change = np.zeros(len(points), dtype=np.int64)
    np.add.at(change, place, steps)
    level = np.cumsum(change)
    at = int(level.argmax())
    return (int(points[at]), int(level[at])) if level[at] > 0 else (0, 0)


def memory_rows(intervals: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return the few times at which the limit can bind, and each interval as a range of these.

    Memory is held in intervals, so only nodes that live together count:

        node a   =======            times  0 1 2 3 4 5 6
        node b     =======          a time matters if a node was born there, and one dies before the
        node c             ===      next is born: the nodes that live at any other time all live at
        rows         ^     ^        such a time together

    Args:
        intervals: Half-open lifetimes; empty where start >= end.

    Returns:
        times: Rising, int64.
        spans: Of each interval the half-open range of `times` in it, int64 of shape (n, 2).
    """
    spans = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    live = spans[:, 0] < spans[:, 1]
    starts = np.unique(spans[live, 0])
    ends = np.unique(spans[live, 1])
    if not len(starts):
        return starts, np.zeros_like(spans)
    # Number of deaths up to each birth; it must rise until the next birth (or the end).
    before = np.searchsorted(ends, starts, side="right")
    times = starts[np.diff(before, append=len(ends)) > 0]
    rows = np.stack(
        [np.searchsorted(times, spans[:, 0]), np.searchsorted(times, spans[:, 1])], axis=1
    )
    rows[~live] = 0
    return times, rows
