"""A cycle of waits as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from sbp_core.dataflow.expansion import Dependency, FlowFiring, Reason
from sbp_core.dataflow.network import Network


def cycle_lines(
    network: Network, cycle: Sequence[Dependency], *, iteration: str = "iteration"
) -> list[str]:
    """Return who waits for whom, a line for each wait; turns of one processor share a line.

    Args:
        network: With the edges that are named.
        cycle: Each waits for the firing that waits in the next one; the last for the first.
        iteration: What an iteration is called, such as a step.
    """
    quotas = {edge.name: edge.quota for edge in network.edges}
    several = {edge.producer for edge in network.edges if edge.produced != edge.consumed}
    several |= {edge.consumer for edge in network.edges if edge.produced != edge.consumed}
    several |= {wait.waiting.actor for wait in cycle if wait.waiting.number}
    counts = Counter(name for order in network.orders.values() for name, _ in order)

    def named(firing: FlowFiring) -> str:
        alone = firing.actor not in several and counts[firing.actor] <= 1
        return firing.actor if alone else f"{firing.actor}[{firing.number}]"

    # A cycle may begin anywhere: not in the middle of a run of turns.
    turns = [(wait.reason is Reason.TURN, wait.name) for wait in cycle]
    start = next((i for i in range(len(cycle)) if turns[i] != turns[i - 1]), 0)
    lines = []
    turned = [*cycle[start:], *cycle[:start]]
    for (is_turn, name), group in groupby(turned, key=lambda w: (w.reason is Reason.TURN, w.name)):
        waits = list(group)
        if is_turn:
            between = f" after {len(waits) - 1} others" if len(waits) > 1 else ""
            delay = sum(wait.delay for wait in waits)
            text = f"{named(waits[0].waiting)} waits for its turn on {name}{between}, behind "
            lines.append(text + named(waits[-1].on) + _before(delay, iteration))
            continue
        for wait in waits:
            what = {
                Reason.DATA: f"data on {name} of",
                Reason.CREDIT: f"credit of {name} (quota {quotas.get(name)}) from",
            }.get(wait.reason, "the end of")
            lines.append(
                f"{named(wait.waiting)} waits for {what} {named(wait.on)}"
                + _before(wait.delay, iteration)
            )
    return lines


def _before(delay: int, iteration: str) -> str:
    if not delay:
        return ""
    return f" of the {iteration} before" if delay == 1 else f" of {delay} {iteration}s before"
