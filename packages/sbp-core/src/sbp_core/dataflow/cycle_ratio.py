"""The maximum cycle ratio of a graph, by Howard's policy iteration.

    maximise    sum of the weights of a cycle / sum of its delays

The period of a dataflow network is this ratio (`timing.critical_cycle`).

    policy      one edge of each node; following it leads from every node into a cycle
    evaluate    ratio r of the best cycle of the policy; nodes whose walk leads into another cycle
                are redirected to it. Value of a node: the weights - r * delays on its walk there
    improve     a node takes another edge if the value at its end, with the edge, is greater

If no node improves, then value[from] >= weight - r * delay + value[to] on all edges. Summed around
any cycle this gives 0 >= weights - r * delays: no cycle has a greater ratio. So the final policy
proves its own optimality, and with integers it is exact. Each change of policy raises r, or the
values at the same r, so no policy repeats.

Source: A. Dasdan, "Experimental analysis of the fastest optimum cycle ratio and mean algorithms",
ACM TODAES 9(4), 2004; Cochet-Terrasson et al., "Numerical computation of spectral elements in
max-plus algebra", 1998. That the ratio is the period: R. Reiter, "Scheduling parallel
computations", JACM 15(4), 1968.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import fsum, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from sbp_core.dataflow.actor_network import Seconds

_Array = npt.NDArray[Any]

#: With floating-point weights, an improvement below this share of the largest value is rounding.
_ROUNDING = 1e-12

#: Integers up to this one are added and doubled safely in 64 bits.
_MOST_INT64 = 2**61


def maximum_cycle_ratio(
    edges: Sequence[tuple[int, int, int]], weights: Sequence[Seconds], values: Sequence[Seconds]
) -> tuple[Seconds, list[int]] | None:
    """Return the greatest ratio of weights to delays over all cycles, and a cycle that has it.

    Args:
        edges: (from, to, delay); no cycle has only delays of 0.
        weights: The weight of each edge, >= 0.
        values: For each node, 0, 1, ..., a guess of the weights on walks from it, for the first
            policy. A better guess needs fewer iterations.

    Returns:
        The ratio, exact if no weight is a float, and the edges of the cycle as they follow each
        other; None if there is no cycle.
    """
    component = _components(len(values), edges)
    inside: dict[int, list[int]] = {}
    for number, (start, end, _) in enumerate(edges):
        if component[start] == component[end]:
            inside.setdefault(component[start], []).append(number)
    best: tuple[Seconds, list[int]] | None = None
    for numbers in inside.values():
        found = _howard([edges[i] for i in numbers], [weights[i] for i in numbers], values)
        if best is None or found[0] > best[0]:
            best = found[0], [numbers[i] for i in found[1]]
    return best


def _howard(
    edges: Sequence[tuple[int, int, int]], weights: Sequence[Seconds], values: Sequence[Seconds]
) -> tuple[Seconds, list[int]]:
    """Return the same for a strongly connected graph, whose nodes have any numbers."""
    is_float = any(isinstance(weight, float) for weight in weights)
    kind: Any = float if is_float else object
    # As integers: the weights times the least common denominator.
    unit = 1 if is_float else lcm(*(Fraction(weight).denominator for weight in weights))
    order = np.argsort([start for start, _, _ in edges], kind="stable")
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)[order]
    nodes, first, start = np.unique(table[:, 0], return_index=True, return_inverse=True)
    end = np.searchsorted(nodes, table[:, 1])
    delay = table[:, 2].astype(kind)
    scaled = [weight if is_float else int(weight * unit) for weight in weights]
    weight = np.array(scaled, dtype=kind)[order]

    def ratio(cycle: list[int]) -> Seconds:
        tokens = sum(int(table[i, 2]) for i in cycle)
        if is_float:
            return fsum(weight[i] for i in cycle) / tokens
        return Fraction(sum(int(weight[i]) for i in cycle), tokens)

    guess = np.array([values[node] * unit for node in nodes.tolist()], dtype=kind)
    # An iteration takes at most the time that it needs alone, so a delay counts at most that.
    policy = _argmax(weight + guess[end] - (guess.max() + weight.max()) * delay, start, first)
    while True:
        cycles = _cycles(end[policy], policy)
        best = max(cycles, key=ratio)
        value_of = ratio(best)
        reduced = _reduced(weight, delay, value_of)
        if len(cycles) > 1:
            policy = _turned(policy, best, start, end)
        value = _evaluated(policy, int(start[best[0]]), end, reduced)
        gained = reduced + value[end]
        choice = _argmax(gained, start, first)
        least = _ROUNDING * max(1e-300, float(np.abs(gained).max())) if is_float else 0
        better = gained[choice] - value > least
        if not better.any():
            return value_of if is_float else value_of / unit, [int(order[i]) for i in best]
        policy = np.where(better, choice, policy)


def _reduced(weight: _Array, delay: _Array, value: Seconds) -> _Array:
    """Return weight - value * delay: integers, times the denominator, unless they are floats."""
    found: _Array
    if isinstance(value, float):
        found = weight - value * delay
        return found
    exact = Fraction(value)
    found = weight * exact.denominator - delay * exact.numerator
    # No walk visits a node twice, so no sum is larger than this.
    if int(np.abs(found).max()) * (len(found) + 1) < _MOST_INT64:
        return found.astype(np.int64)
    return found


def _argmax(values: _Array, start: _Array, first: _Array) -> _Array:
    """Return for each node its first edge of the greatest value; edges are grouped by node."""
    most = np.maximum.reduceat(values, first)
    hits = np.flatnonzero(values == most[start])
    _, chosen = np.unique(start[hits], return_index=True)
    return hits[chosen]


def _cycles(following: _Array, policy: _Array) -> list[list[int]]:
    """Return the cycles of a policy, as edges in the order in which they are followed."""
    reached = following
    for _ in range(len(following).bit_length()):
        reached = reached[reached]
    # After more steps than there are nodes every walk is on a cycle.
    left = set(np.unique(reached).tolist())
    cycles = []
    while left:
        node = min(left)
        cycle = []
        while node in left:
            left.remove(node)
            cycle.append(int(policy[node]))
            node = int(following[node])
        cycles.append(cycle)
    return cycles


def _turned(policy: _Array, best: list[int], start: _Array, end: _Array) -> _Array:
    """Redirect the nodes whose walks do not lead to a cycle so that they do."""
    into = np.argsort(end, kind="stable")
    bounds = np.searchsorted(end[into], np.arange(len(policy) + 1))
    policy = policy.copy()
    reached = np.zeros(len(policy), dtype=bool)
    todo = [int(start[i]) for i in best]
    reached[todo] = True
    # First along the policy itself, so that nodes that lead there already keep their edge.
    for keep in (True, False):
        todo = np.flatnonzero(reached).tolist()
        while todo:
            node = todo.pop()
            for edge in into[bounds[node] : bounds[node + 1]].tolist():
                other = int(start[edge])
                if not reached[other] and (not keep or policy[other] == edge):
                    reached[other] = True
                    policy[other] = edge
                    todo.append(other)
    return policy


def _evaluated(policy: _Array, root: int, end: _Array, reduced: _Array) -> _Array:
    """Return the sum of reduced weights on each node's walk to a root on the only cycle."""
    values, following = reduced[policy], end[policy]
    values[root], following[root] = 0, root
    # Pointer doubling: each round, a walk of twice as many edges.
    while (following != root).any():
        values = values + values[following]
        following = following[following]
    return values


def _components(num_nodes: int, edges: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the strongly connected component of each node (Tarjan 1972, without recursion)."""
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    for start, end, _ in edges:
        after[start].append(end)
    number, low, component = [-1] * num_nodes, [0] * num_nodes, [-1] * num_nodes
    stack: list[int] = []
    count = 0
    for root in range(num_nodes):
        if number[root] >= 0:
            continue
        walk = [(root, iter(after[root]))]
        number[root] = low[root] = count
        count += 1
        stack.append(root)
        while walk:
            node, rest = walk[-1]
            for other in rest:
                if number[other] < 0:
                    number[other] = low[other] = count
                    count += 1
                    stack.append(other)
                    walk.append((other, iter(after[other])))
                    break
                if component[other] < 0:
                    low[node] = min(low[node], number[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[node])
                if low[node] == number[node]:
                    while component[node] < 0:
                        component[stack.pop()] = node
    return component
