"""Deadlock analysis of dataflow networks: liveness, cycles of waits, and sufficient quotas.

    theorem    a marked graph is live exactly when each cycle carries a token (Commoner, Holt, Even
               and Pnueli 1971). A network is live exactly when its homogeneous network is (Lee and
               Messerschmitt 1987): when no cycle of waits is within one iteration.

If an iteration ends, each edge holds as many tokens as before, so every later iteration ends, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from sbp_core.dataflow.actor_network import FlowEdge, Network, repetitions
from sbp_core.dataflow.expansion import Dependency, Expansion, FlowFiring, Reason, expand
from sbp_core.errors import SbpValueError


def check_live(network: Network) -> None:
    """Check that a network can run for ever.

    Raises:
        SbpValueError: it deadlocks (shows the cycle and sufficient quotas); or inconsistent rates.
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
    """Return waits that form a cycle without a token, each on the next one's firing; or None."""
    expansion = expand(network)
    waits = dead_waits(expansion)
    return None if waits is None else expansion.dependencies(waits)


def dead_waits(expansion: Expansion) -> list[int] | None:
    """Return the numbers of waits that form a cycle within an iteration; None if there is none."""
    order, blocked = topological(expansion)
    if len(order) == len(expansion.duration_s):
        return None
    # Each remaining node waits for another remaining one: a walk returns to one of them.
    seen: dict[int, int] = {}
    waits: list[int] = []
    node = next(iter(blocked))
    while node not in seen:
        seen[node] = len(waits)
        waits.append(blocked[node])
        node = expansion.on[blocked[node]]
    return waits[seen[node] :]


def topological(expansion: Expansion) -> tuple[list[int], dict[int, int]]:
    """Return the nodes in a valid firing order, and a wait of each node that can never fire."""
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
    """Return larger quotas that make a network live.

    As long as there is a cycle without a token, one quota grows until one of the cycle's waits for
    credit is over: the quota that has to grow least. At the end, quotas that need not have grown,
    given the final values of the others, are reset.

    Returns:
        The quota of each edge that needs a larger one, all of which are necessary; empty if the
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
    """Return the least quota with which a firing does not wait for credit of another firing."""
    # The credits that the consumer's earlier firings have given back.
    free = edge.consumed * wait.on.number
    return edge.initial + edge.produced * (wait.waiting.number + 1) - free


# Messages.


def cycle_lines(
    network: Network,
    cycle: Sequence[Dependency],
    *,
    iteration: str = "iteration",
    named: Callable[[FlowFiring], str] | None = None,
) -> list[str]:
    """Return one line for each wait of a cycle; turns of one processor share a line.

    A cycle that consists of all turns of one iteration means that the processor never pauses.

    Args:
        network: The network with the named edges.
        cycle: Each waits for the firing that waits in the next one; the last for the first.
        iteration: The word for an iteration, such as "step".
        named: Returns the name of a firing; by default `actor[number]`.
    """
    if not cycle:
        return []
    quotas = {edge.name: edge.quota for edge in network.edges}
    counts = repetitions(network) if named is None else {}

    def numbered(firing: FlowFiring) -> str:
        return firing.actor + (f"[{firing.number}]" if counts[firing.actor] > 1 else "")

    named = named or numbered
    if (never_idle := _never_idle(cycle, iteration, named)) is not None:
        return [never_idle]
    # A cycle may begin anywhere; begin it outside of a run of turns.
    turns = [(wait.reason is Reason.TURN, wait.name) for wait in cycle]
    start = next((i for i in range(len(cycle)) if turns[i] != turns[i - 1]), 0)
    lines = []
    turned = [*cycle[start:], *cycle[:start]]
    for (is_turn, name), group in groupby(turned, key=lambda w: (w.reason is Reason.TURN, w.name)):
        waits = list(group)
        if is_turn:
            since = f" and {len(waits) - 1} more, since" if len(waits) > 1 else ""
            last = named(waits[-1].on) + _before(sum(w.delay for w in waits), iteration)
            before = f"{named(waits[0].on)}{since} {last}" if since else last
            lines.append(f"{named(waits[0].waiting)} waits for its turn on {name} after {before}")
            continue
        for wait in waits:
            on = named(wait.on) + _before(wait.delay, iteration)
            text = {
                Reason.DATA: f"data of {on}",
                Reason.CREDIT: f"credit of {wait.name} (quota {quotas.get(wait.name)}), which {on} "
                "gives back",
            }.get(wait.reason, f"the end of {on}")
            lines.append(f"{named(wait.waiting)} waits for {text}")
    return lines


def _never_idle(
    cycle: Sequence[Dependency], iteration: str, named: Callable[[FlowFiring], str]
) -> str | None:
    """Return a line about a processor that works through an iteration without a pause, or None."""
    wraps = [wait for wait in cycle if wait.delay]
    same = {wait.name for wait in cycle if wait.reason is Reason.TURN}
    is_turns = all(wait.reason is Reason.TURN for wait in cycle)
    if not is_turns or len(same) > 1 or [wait.delay for wait in wraps] != [1]:
        return None
    (name,), wrap = same, wraps[0]
    if len(cycle) == 1:
        return f"{name} does nothing but {named(wrap.on)}, {iteration} after {iteration}"
    return (
        f"{name} is never idle: {len(cycle)} firings of each {iteration} follow without a pause, "
        f"from {named(wrap.waiting)} to {named(wrap.on)}"
    )


def _before(delay: int, iteration: str) -> str:
    if not delay:
        return ""
    return f" of the {iteration} before" if delay == 1 else f" of {delay} {iteration}s before"
