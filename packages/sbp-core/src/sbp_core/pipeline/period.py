"""How fast a pipeline runs that never drains: the time between micro-batches in the long run.

Rank r of p does w = p-1-r forwards ahead, then F and B in turn, for ever. What waits for what:

    F(r, k)          after  F(r-1, k)                   one stage after the other
    B(r, k)          after  B(r+1, k), or F(r, k) on the last rank
    B(r, k)          after  F(r, k + w)                 the order of a rank
    F(r, k + w + 1)  after  B(r, k)

A dependency over d micro-batches is an edge with d tokens. In the long run a micro-batch takes the
maximum over all cycles of (time on the cycle) / (tokens on the cycle), and reaches it.

Source: Reiter, Scheduling Parallel Computations (JACM 1968); the search goes from a cycle to a
better one, as in Dasdan, Experimental Analysis of the Fastest Optimum Cycle Ratio and Mean
Algorithms (TODAES 2004).

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from sbp_core.pipeline.times import StageTimes

_Edge = tuple[int, int, Fraction, int]
"""From, to, time from begin to begin, and tokens."""


def alternation_period(times: Sequence[StageTimes], transfer: Fraction) -> Fraction:
    """Return the time between micro-batches of an endless 1F1B.

    Args:
        times: Of each rank.
        transfer: The time between neighbouring ranks.
    """
    edges = _edges(times, transfer)
    period = max(time.work for time in times)
    while (better := _better_cycle(edges, 2 * len(times), period)) is not None:
        period = better
    return period


def _edges(times: Sequence[StageTimes], transfer: Fraction) -> list[_Edge]:
    """Return the dependencies; the forward of rank r is 2r, its backward 2r + 1."""
    p = len(times)
    edges: list[_Edge] = []
    for r, time in enumerate(times):
        backward = time.input_gradient + time.weight_gradient
        ahead = p - 1 - r
        edges.append((2 * r, 2 * r + 1, time.forward, -ahead))
        edges.append((2 * r + 1, 2 * r, backward, ahead + 1))
        if r:
            edges.append((2 * r + 1, 2 * r - 1, backward + transfer, 0))
        if r + 1 < p:
            edges.append((2 * r, 2 * r + 2, time.forward + transfer, 0))
    return edges


def _better_cycle(edges: Sequence[_Edge], num_nodes: int, period: Fraction) -> Fraction | None:
    """Return the ratio of a cycle above `period`, by Bellman and Ford's longest paths."""
    longest = [Fraction(0)] * num_nodes
    entered: list[_Edge | None] = [None] * num_nodes
    raised = None
    for _ in range(num_nodes):
        raised = None
        for edge in edges:
            source, target, time, tokens = edge
            reached = longest[source] + time - period * tokens
            if reached > longest[target]:
                longest[target], entered[target], raised = reached, edge, target
        if raised is None:
            return None
    # So many steps back from a node that still rises lead onto a cycle.
    node = raised
    for _ in range(num_nodes):
        node = _entering(entered, node)[0]
    cycle = [_entering(entered, node)]
    while cycle[-1][0] != node:
        cycle.append(_entering(entered, cycle[-1][0]))
    return sum((edge[2] for edge in cycle), Fraction(0)) / sum(edge[3] for edge in cycle)


def _entering(entered: Sequence[_Edge | None], node: int | None) -> _Edge:
    edge = None if node is None else entered[node]
    assert edge is not None, "a node that has risen was entered by an edge"
    return edge
