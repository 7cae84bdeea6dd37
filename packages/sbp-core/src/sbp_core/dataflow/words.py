"""A cycle of waits as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from sbp_core.dataflow.expansion import Dependency, FlowFiring, Reason
from sbp_core.dataflow.network import Network
from sbp_core.dataflow.rates import repetitions


def cycle_lines(
    network: Network,
    cycle: Sequence[Dependency],
    *,
    iteration: str = "iteration",
    named: Callable[[FlowFiring], str] | None = None,
) -> list[str]:
    """Return who waits for whom, a line for each wait; turns of one processor share a line.

    A cycle of nothing but the turns of one iteration says that this processor never pauses.

    Args:
        network: With the edges that are named.
        cycle: Each waits for the firing that waits in the next one; the last for the first.
        iteration: What an iteration is called, such as a step.
        named: What a firing is called; without, `actor[number]`.
    """
    if not cycle:
        return []
    quotas = {edge.name: edge.quota for edge in network.edges}
    named = named or _numbered(network)
    if (never_idle := _never_idle(cycle, iteration, named)) is not None:
        return [never_idle]
    # A cycle may begin anywhere: not in the middle of a run of turns.
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
            lines.append(f"{named(waits[0].waiting)} waits for its turn on {name} behind {before}")
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
    """Return that one processor works through an iteration without a pause; None if none does."""
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


def _numbered(network: Network) -> Callable[[FlowFiring], str]:
    counts = repetitions(network)
    return lambda firing: firing.actor + (f"[{firing.number}]" if counts[firing.actor] > 1 else "")


def _before(delay: int, iteration: str) -> str:
    if not delay:
        return ""
    return f" of the {iteration} before" if delay == 1 else f" of {delay} {iteration}s before"
