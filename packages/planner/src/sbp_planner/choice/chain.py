"""Choose a strategy for each layer of a chain at least cost under a memory limit, exactly.

    minimise    sum_i cost_i(s_i) + sum_i edge_i(s_i, s_i+1)
    such that   sum_i bytes_i(s_i) <= limit                       all nodes live at the same time

The planners `galvatron` and `osdp` use it. It is dynamic programming over sets of Pareto-best sums.
A layer of a network is a node, a strategy the way it is parallelised. The memory of all layers adds
up, because parameters and activations of all of them exist at the end of the forward pass. For each
strategy of the last node so far, the Pareto-best pairs (bytes, cost) are kept; a step adds one node
to all of them at once:

    cost |  o                          o  kept
         |     o  x                    x  another has no more bytes and costs no more
         |        o     x              |  more than the limit leaves for the nodes to come
         +----------------|-- bytes

Without edges it is a knapsack, with one set of pairs for all strategies. A pair is also dropped if
the best ratio of cost to bytes among the later nodes could not make it fit at less cost than a
greedy choice has.

Bytes are exact integers: nothing is rounded. Takes O(n · k² · p log p) for n nodes, k strategies
and p kept pairs; p is at most the number of different sums of bytes, so it stays small if nodes are
alike.

Source: Miao et al., "Galvatron", VLDB 2022 (the program over layers, there over rounded
megabytes); Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management
Science 15 (1969) (lists of undominated sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite
from typing import NamedTuple

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.problem import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The best strategies of a chain.

    Args:
        assignment: The strategy index of each node.
        cost: Their total cost.
        usage: Their total bytes.
    """

    assignment: tuple[int, ...]
    cost: float
    usage: int


class _Front(NamedTuple):
    """The kept pairs of one node: bytes, cost, its strategy, and the index of the previous pair."""

    usage: Ints
    cost: Floats
    strategy: Ints
    before: Ints


class _Rest(NamedTuple):
    """The later nodes without edges: their least cost, its bytes, and the least cost of a byte."""

    cost: float
    usage: int
    ratio: float


def solve_chain(
    costs: Sequence[Floats],
    usages: Sequence[Ints],
    edge_costs: Sequence[Floats] | None,
    usage_limit: float | None = None,
) -> ChainSolution | None:
    """Return the cheapest strategies that fit; of equally cheap ones those with the fewest bytes.

    Args:
        costs: For each node the cost of each strategy, float64; `inf` forbids.
        usages: For each node the bytes of each strategy, >= 0, int64.
        edge_costs: For each node but the last its costs with the next, float64 of shape
            (strategies, strategies of the next); `inf` forbids. None for a knapsack.
        usage_limit: Largest sum of bytes; None for no limit.

    Returns:
        The strategies; None if none are allowed and fit.

    Raises:
        SbpValueError: If the shapes of the tables do not match, a cost is NaN or -inf, or bytes are
            below 0.
    """
    costs = [np.asarray(cost, dtype=np.float64) for cost in costs]
    usages = [np.asarray(usage) for usage in usages]
    tables = None if edge_costs is None else [np.asarray(t, dtype=np.float64) for t in edge_costs]
    _check(costs, usages, tables)
    # A limit above the sum of all nodes is no limit; so bytes of any size stay exact.
    most = sum(int(usage.max()) for usage in usages)
    limited = usage_limit is not None and isfinite(usage_limit)
    limit = min(floor(usage_limit), most) if limited and usage_limit is not None else most
    if usage_limit == -inf:
        limit = -1
    if limit < 0 or any(cost.min() == inf for cost in costs):
        return None
    # The least bytes of the later nodes.
    later = [0]
    for usage in reversed(usages):
        later.append(later[-1] + int(usage.min()))
    rests, dearest = _rests(costs, usages, limit) if tables is None else ([], inf)
    nothing = np.zeros(1, dtype=np.int64)
    fronts = [_Front(nothing, np.zeros(1), nothing, nothing)]
    for node, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        previous, found = fronts[-1], []
        table = tables[node - 1][previous.strategy] if tables is not None and node else 0.0
        every = np.arange(len(cost))
        for own in every[None, :] if tables is None else every[:, None]:
            between = table if isinstance(table, float) else table[:, own]
            held = (previous.usage[:, None] + usage[own]).ravel()
            total = (previous.cost[:, None] + between + cost[own]).ravel()
            good = (held <= limit - later[len(costs) - node - 1]) & (total < inf)
            if rests:
                rest = rests[node]
                over = np.maximum(held + rest.usage - limit, 0)
                needed = np.where(over > 0, over * rest.ratio if rest.ratio < inf else inf, 0.0)
                good &= total + rest.cost + needed <= dearest
            place = np.flatnonzero(good)
            kept = place[_undominated(held[place], total[place])]
            found.append((held[kept], total[kept], own[kept % len(own)], kept // len(own)))
        fronts.append(_Front(*(np.concatenate(arrays) for arrays in zip(*found, strict=True))))
        if not len(fronts[-1].cost):
            return None
    last = fronts[-1]
    place_of = best = int(np.lexsort((last.usage, last.cost))[0])
    assignment = []
    for front in reversed(fronts[1:]):
        assignment.append(int(front.strategy[place_of]))
        place_of = int(front.before[place_of])
    return ChainSolution(
        assignment=tuple(reversed(assignment)),
        cost=float(last.cost[best]),
        usage=int(last.usage[best]),
    )


def _check(
    costs: Sequence[Floats], usages: Sequence[Ints], tables: Sequence[Floats] | None
) -> None:
    edges = max(len(costs) - 1, 0) if tables is None else len(tables)
    if len(usages) != len(costs) or edges != max(len(costs) - 1, 0):
        raise SbpValueError(
            f"{len(costs)} costs, {len(usages)} usages and {edges} edge_costs",
            accepted="as many usages as costs, and one entry of edge_costs less",
        )
    for node, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        if cost.ndim != 1 or cost.shape != usage.shape or not len(cost):
            raise SbpValueError(
                f"node {node} has costs of shape {cost.shape} and usages of shape {usage.shape}",
                accepted="one of both for each of one or more strategies",
            )
        if usage.dtype.kind not in "iu" or usage.min() < 0:
            raise SbpValueError(f"usages[{node}] is {usage}", accepted="whole bytes >= 0")
    for name, of in (("costs", costs), ("edge_costs", tables or ())):
        for node, table in enumerate(of):
            if table.size and not table.min() > -inf:
                raise SbpValueError(f"{name}[{node}] has NaN or -inf", accepted="numbers, or inf")
    for node, table in enumerate(tables or ()):
        accepted = len(costs[node]), len(costs[node + 1])
        if table.shape != accepted:
            raise SbpValueError(
                f"edge_costs[{node}] has shape {table.shape}", accepted=f"shape {accepted}"
            )


def _undominated(usage: Ints, cost: Floats) -> Ints:
    """Return the indices of the Pareto-best pairs; one of several equal pairs."""
    order = np.lexsort((cost, usage))
    sorted_cost = cost[order]
    # By rising bytes, a pair is kept if it costs less than all before it.
    least_before = np.concatenate([[inf], np.minimum.accumulate(sorted_cost)[:-1]])
    result: Ints = order[sorted_cost < least_before[: len(order)]]
    return result


def _rests(
    costs: Sequence[Floats], usages: Sequence[Ints], limit: int
) -> tuple[list[_Rest], float]:
    """Return the sums over the nodes after each node, and the cost of a greedy choice that fits.

    The greedy choice takes the cheapest strategies, then changes by rising ratio of cost to bytes.
    A later change of a node replaces an earlier one.
    """
    changes: list[tuple[float, int, int, float]] = []
    rests, rest = [], _Rest(0.0, 0, inf)
    for node in reversed(range(len(costs))):
        rests.append(rest)
        cost, usage = costs[node], usages[node]
        cheapest = np.lexsort((usage, cost))[0]
        saved, added = int(usage[cheapest]) - usage, cost - cost[cheapest]
        own = [
            (float(added[k]) / int(saved[k]), node, int(saved[k]), float(added[k]))
            for k in np.flatnonzero((saved > 0) & (cost < inf))
        ]
        changes += own
        rest = _Rest(
            cost=rest.cost + float(cost[cheapest]),
            usage=rest.usage + int(usage[cheapest]),
            ratio=min([rest.ratio, *(change[0] for change in own)]),
        )
    taken: dict[int, tuple[int, float]] = {}
    over = rest.usage - limit
    for _, node, saves, adds in sorted(changes):
        before = taken.get(node, (0, 0.0))[0]
        if over > 0 and saves > before:
            taken[node] = saves, adds
            over -= saves - before
    total = inf if over > 0 else rest.cost + sum(adds for _, adds in taken.values())
    # Sums in another order may differ in their last digits.
    return rests[::-1], total + 1e-9 * abs(total) if total < inf else inf
