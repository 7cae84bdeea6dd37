"""Live, or the firings that wait for each other.

    theorem    a marked graph is live exactly when each cycle carries a token (Commoner, Holt, Even
               and Pnueli 1971). A network is live exactly when its homogeneous network is (Lee and
               Messerschmitt 1987): when no cycle of waits lies within one iteration.

If an iteration ends, all edges hold what they began with, so every later one ends, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.dataflow.expansion import Dependency, Expansion, Reason, expand
from sbp_core.dataflow.network import FlowEdge, Network
from sbp_core.dataflow.words import cycle_lines
from sbp_core.errors import SbpValueError


def check_live(network: Network) -> None:
    """Check that a network goes on for ever.

    Raises:
        SbpValueError: it does not: with the cycle of waits, and quotas that would be enough; or
            its rates are not consistent.
    """
    cycle = dead_cycle(network)
    if cycle is None:
        return
    quotas = sufficient_quotas(network)
    if quotas is None:
        todo = "no quota helps: put initial tokens on an edge of the cycle, or change the order"
    else:
        todo = ", ".join(f"raise the quota of {n!r} to {quota}" for n, quota in quotas.items())
    raise SbpValueError(
        "the network would deadlock: each of these waits for the next",
        where=cycle_lines(network, cycle),
        todo=todo,
    )


def dead_cycle(network: Network) -> tuple[Dependency, ...] | None:
    """Return waits that close a cycle without a token, the next one's for the last; or None."""
    expansion = expand(network)
    waits = dead_waits(expansion)
    return None if waits is None else expansion.dependencies(waits)


def dead_waits(expansion: Expansion) -> list[int] | None:
    """Return the numbers of waits that close a cycle within an iteration; None if there is none."""
    order, blocked = topological(expansion)
    if len(order) == len(expansion.duration_s):
        return None
    # Each node that is left waits for another one that is left: a walk comes back to one of them.
    seen: dict[int, int] = {}
    waits: list[int] = []
    node = next(iter(blocked))
    while node not in seen:
        seen[node] = len(waits)
        waits.append(blocked[node])
        node = expansion.on[blocked[node]]
    return waits[seen[node] :]


def topological(expansion: Expansion) -> tuple[list[int], dict[int, int]]:
    """Return the nodes in an order in which they can fire, and of each other a wait for another."""
    num = len(expansion.duration_s)
    after: list[list[int]] = [[] for _ in range(num)]
    missing = [0] * num
    for wait, delay in enumerate(expansion.delay):
        if not delay:
            after[expansion.on[wait]].append(expansion.waiting[wait])
            missing[expansion.waiting[wait]] += 1
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:
        for other in after[node]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    blocked = {
        expansion.waiting[wait]: wait
        for wait, delay in enumerate(expansion.delay)
        if not delay and missing[expansion.on[wait]] and missing[expansion.waiting[wait]]
    }
    return order, blocked


def sufficient_quotas(network: Network) -> Mapping[str, int] | None:
    """Return quotas that make a network live, of the edges whose own do not.

    As long as there is a cycle without a token, the quota that has to grow least, of those whose
    credits it waits for, grows until this wait is over. Those that need not have grown, with what
    the others are by then, are left as they were.

    Returns:
        The quota of each edge that needs a larger one, none of which can be left out; none if the
        network is live; None if a cycle waits for no credit, so that no quota helps.
    """
    raised: dict[str, int] = {}
    quotas = {edge.name: edge.quota or 0 for edge in network.edges}
    while waits := dead_cycle(_with_quotas(network, raised)):
        edges = {edge.name: edge for edge in network.edges}
        choices = [
            (_enough(edges[wait.name], wait), wait.name)
            for wait in waits
            if wait.reason is Reason.CREDIT
        ]
        if not choices:
            return None
        quota, name = min(choices, key=lambda c: (c[0] - raised.get(c[1], quotas[c[1]]), c[1]))
        raised[name] = quota
    for name in list(raised):
        fewer = {other: quota for other, quota in raised.items() if other != name}
        if dead_cycle(_with_quotas(network, fewer)) is None:
            raised = fewer
    return raised


def _with_quotas(network: Network, quotas: Mapping[str, int]) -> Network:
    edges = [
        replace(edge, quota=quotas[edge.name]) if edge.name in quotas else edge
        for edge in network.edges
    ]
    return replace(network, edges=tuple(edges))


def _enough(edge: FlowEdge, wait: Dependency) -> int:
    """Return the least quota with which a firing waits no more for credit of another firing."""
    # The credits that the consumer's firings before the one waited for have given back.
    free = edge.consumed * wait.on.number
    return edge.initial + edge.produced * (wait.waiting.number + 1) - free
