"""Chains under a memory limit: exact, by dynamic programming over sets of Pareto-best sums.

    minimise    sum_i cost_i(s_i) + sum_i edge_i(s_i, s_i+1)
    such that   sum_i bytes_i(s_i) <= limit                       all nodes live at the same time

A layer of a network is a node, a strategy the way it is parallelised; the memory of all layers adds
up, as parameters and activations of all of them are there at the end of the forward pass. For
each strategy of the last node so far, the pairs (bytes, cost) of which none is as small in both
are kept; a step adds one node to all of them at once:

    cost |  o                          o  kept
         |     o  x                    x  another has no more bytes and costs no more
         |        o     x              |  more than the limit leaves for the nodes to come
         +----------------|-- bytes

Bytes are exact integers: nothing is rounded. Takes O(n · k² · p log p) for n nodes, k strategies
and p kept pairs; p is at most the number of different sums of bytes, so that it stays small if
nodes are alike.

Source: Miao et al., "Galvatron", VLDB 2022 (the program over layers, there over rounded
megabytes); Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management
Science 15 (1969) (lists of undominated sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.problem import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The best strategies of a chain.

    Args:
        assignment: The strategy index of each node.
        cost: Their total cost.
        usage: Bytes that they hold together.
    """

    assignment: tuple[int, ...]
    cost: float
    usage: int


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """The kept pairs of one node, strategy by strategy: bytes rise, costs fall within each.

    Args:
        usage: int64 of shape (pairs,).
        cost: float64 of shape (pairs,).
        strategy: Of this node, int64 of shape (pairs,).
        before: Which pair of the node before it came from, int64 of shape (pairs,).
    """

    usage: Ints
    cost: Floats
    strategy: Ints
    before: Ints


def solve_chain(
    costs: Sequence[Floats],
    usages: Sequence[Ints],
    edge_costs: Sequence[Floats],
    usage_limit: float | None = None,
) -> ChainSolution | None:
    """Return the cheapest strategies that fit; among equals those with the fewest bytes.

    Args:
        costs: For each node the cost of each strategy, float64; `inf` forbids.
        usages: For each node the bytes of each strategy, >= 0, int64.
        edge_costs: For each node but the last its costs with the next, float64 of shape
            (strategies, strategies of the next); `inf` forbids.
        usage_limit: Bytes; None for no limit.

    Returns:
        The strategies; None if none are allowed and fit.

    Raises:
        SbpValueError: If the tables do not belong together, a cost is NaN or -inf, or bytes are
            below 0.
    """
    costs = [np.asarray(cost, dtype=np.float64) for cost in costs]
    usages = [np.asarray(usage) for usage in usages]
    edge_costs = [np.asarray(table, dtype=np.float64) for table in edge_costs]
    _check(costs, usages, edge_costs)
    # More than all nodes can hold is no limit; with that, bytes of any size are exact.
    most = sum(int(usage.max()) for usage in usages)
    limited = usage_limit is not None and isfinite(usage_limit)
    limit = min(floor(usage_limit), most) if limited and usage_limit is not None else most
    if usage_limit == -inf:
        limit = -1
    # What the nodes to come hold at least.
    later = [0]
    for usage in reversed(usages):
        later.append(later[-1] + int(usage.min()))
    later.reverse()
    fronts: list[_Front] = []
    for node, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        previous = fronts[-1] if fronts else None
        table = edge_costs[node - 1] if node else None
        front = _extended(previous, table, cost, usage, limit - later[node + 1])
        if not len(front.cost):
            return None
        fronts.append(front)
    return _read_back(fronts, limit)


def _check(costs: Sequence[Floats], usages: Sequence[Ints], edge_costs: Sequence[Floats]) -> None:
    if len(usages) != len(costs) or len(edge_costs) != max(len(costs) - 1, 0):
        raise SbpValueError(
            f"{len(costs)} costs, {len(usages)} usages and {len(edge_costs)} edge_costs",
            accepted="as many usages as costs, and one edge less",
        )
    for node, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        if cost.ndim != 1 or cost.shape != usage.shape or not len(cost):
            raise SbpValueError(
                f"node {node} has costs of shape {cost.shape} and usages of shape {usage.shape}",
                accepted="one of both for each of one or more strategies",
            )
        if usage.dtype.kind not in "iu" or usage.min() < 0:
            raise SbpValueError(f"usages[{node}] is {usage}", accepted="whole bytes >= 0")
    for name, tables in (("costs", costs), ("edge_costs", edge_costs)):
        for node, table in enumerate(tables):
            if table.size and not table.min() > -inf:
                raise SbpValueError(f"{name}[{node}] has NaN or -inf", accepted="numbers, or inf")
    for node, table in enumerate(edge_costs):
        accepted = len(costs[node]), len(costs[node + 1])
        if table.shape != accepted:
            raise SbpValueError(
                f"edge_costs[{node}] has shape {table.shape}", accepted=f"shape {accepted}"
            )


def _extended(
    previous: _Front | None, table: Floats | None, cost: Floats, usage: Ints, limit: int
) -> _Front:
    """Add a node to all kept pairs, and keep what is best for each of its strategies."""
    found: list[tuple[Ints, Floats, Ints, Ints]] = []
    for strategy, (own_cost, own_usage) in enumerate(
        zip(cost.tolist(), usage.tolist(), strict=True)
    ):
        if previous is None or table is None:
            bytes_held = np.array([own_usage], dtype=np.int64)
            total = np.array([own_cost])
        else:
            bytes_held = previous.usage + own_usage
            total = previous.cost + table[previous.strategy, strategy] + own_cost
        place = np.flatnonzero((bytes_held <= limit) & (total < inf))
        kept = place[_undominated(bytes_held[place], total[place])]
        found.append((bytes_held[kept], total[kept], np.full(len(kept), strategy), kept))
    return _Front(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _undominated(usage: Ints, cost: Floats) -> Ints:
    """Return the places of the pairs that none other is as small as in both; of equals one."""
    order = np.lexsort((cost, usage))
    sorted_cost = cost[order]
    # By rising bytes, a pair is kept if it costs less than all before it.
    least_before = np.concatenate([[inf], np.minimum.accumulate(sorted_cost)[:-1]])
    result: Ints = order[sorted_cost < least_before[: len(order)]]
    return result


def _read_back(fronts: Sequence[_Front], limit: int) -> ChainSolution | None:
    if not fronts:
        return ChainSolution(assignment=(), cost=0.0, usage=0) if limit >= 0 else None
    last = fronts[-1]
    place = best = int(np.lexsort((last.usage, last.cost))[0])
    assignment = []
    for front in reversed(fronts):
        assignment.append(int(front.strategy[place]))
        place = int(front.before[place])
    return ChainSolution(
        assignment=tuple(reversed(assignment)),
        cost=float(last.cost[best]),
        usage=int(last.usage[best]),
    )
