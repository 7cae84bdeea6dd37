r"""Expand a dataflow network to one node for each firing of an iteration; all rates become one.

    a --2|0|3--> b      produces 2, 0 initial, consumes 3 tokens; so q = (3, 2) firings

    a[0]  a[1]  a[2]          b[0] needs tokens 0..2, the last of them from a[1]
            \     \           b[1] needs tokens 3..5, the last of them from a[2]
            b[0]  b[1]

Firing j of the consumer needs `consumed * (j + 1)` tokens, so the producer's firing number

    n = ceil((consumed * (j + 1) - initial) / produced)      (counted from 1)

has to be over; the firing q earlier is the same node one iteration before: a *delay* of 1. Edges
have no negative tokens, so no delay is negative. A credit, a limit of concurrent firings, and the
turn of a processor are waits of the same form. So each wait is

    start of firing >= end of the other, `delay` iterations before

There are as many nodes as firings, and at most two waits for each firing of each edge. So only high
rates make an iteration large (`actor_network.MOST_FIRINGS`).

Source: Sriram and Bhattacharyya, "Embedded Multiprocessors", 2nd ed., ch. 3.8 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sbp_core.dataflow.actor_network import Network, Seconds, repetitions


class Reason(Enum):
    """The reason why a firing waits."""

    DATA = "data"
    CREDIT = "credit"
    #: An earlier firing of the same actor.
    ITSELF = "itself"
    #: The previous firing on a processor.
    TURN = "turn"


class FlowFiring(NamedTuple):
    """A firing of an iteration: the actor, and the index of the firing, from 0."""

    actor: str
    number: int


class Dependency(NamedTuple):
    """A firing waits for the end of another.

    Args:
        waiting, on: The firings.
        delay: The number of iterations by which the firing `on` is earlier.
        reason: The reason of the wait.
        name: The name of the edge, the processor, or the actor itself, depending on the reason.
    """

    waiting: FlowFiring
    on: FlowFiring
    delay: int
    reason: Reason
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The firings of an iteration as nodes, and their waits.

    Args:
        network: The expanded network.
        counts: Firings of each actor in an iteration.
        first: The node of each actor's first firing; the nodes of its later firings follow it.
        duration_s: The duration of each node.
        on, waiting, delay: For each wait its two nodes, and the iterations between them.
        reasons: For each wait the reason, and the name of the edge, processor or actor.
    """

    network: Network
    counts: Mapping[str, int]
    first: Mapping[str, int]
    duration_s: list[Seconds]
    on: list[int]
    waiting: list[int]
    delay: list[int]
    reasons: list[tuple[Reason, str]]

    def firings(self) -> list[FlowFiring]:
        """Return the firing of each node."""
        return [FlowFiring(name, i) for name, count in self.counts.items() for i in range(count)]

    def dependencies(self, waits: list[int]) -> tuple[Dependency, ...]:
        """Return waits, given by their numbers, as `Dependency` values."""
        firings = self.firings()
        return tuple(
            Dependency(
                firings[self.waiting[i]], firings[self.on[i]], self.delay[i], *self.reasons[i]
            )
            for i in waits
        )


def expand(network: Network) -> Expansion:
    """Return the homogeneous network.

    Raises:
        SbpValueError: the rates are not consistent (see `actor_network.repetitions`).
    """
    counts = repetitions(network)
    first, duration_s = dict[str, int](), list[Seconds]()
    for name, count in counts.items():
        first[name] = len(duration_s)
        duration_s += [network.by_name[name].duration_s] * count
    on, waiting, delay, reasons = list[int](), list[int](), list[int](), []
    # Turns first: if several waits delay a firing equally, messages name the first one, and turns
    # need the fewest words.
    for processor, order in network.orders.items():
        nodes = [first[name] + index for name, index in order]
        on += nodes
        waiting += nodes[1:] + nodes[:1]
        delay += [0] * (len(nodes) - 1) + [1] * bool(nodes)
        reasons += [(Reason.TURN, processor)] * len(nodes)
    for reason, name, source, target, rates in _waits(network):
        start, end = first[source], first[target]
        for index, (number, iterations) in enumerate(
            waited_for(counts[source], counts[target], *rates)
        ):
            on.append(start + number)
            waiting.append(end + index)
            delay.append(iterations)
            reasons.append((reason, name))
    return Expansion(
        network=network, counts=counts, first=first, duration_s=duration_s, on=on,
        waiting=waiting, delay=delay, reasons=reasons,
    )  # fmt: skip


def waited_for(
    num_others: int, num_waiting: int, produced: int, consumed: int, initial: int
) -> Iterator[tuple[int, int]]:
    """Yield for each firing of an actor the other's firing that it waits for, and the delay.

    Args:
        num_others: Firings of the other in an iteration.
        num_waiting: Firings of the actor.
        produced: Tokens that a firing of the other produces, or credits that it gives back.
        consumed: Tokens that a firing of the actor consumes, or credits that it takes.
        initial: Initial tokens, or credits that are free at the begin.
    """
    for index in range(num_waiting):
        needed = -((initial - consumed * (index + 1)) // produced)
        iteration, number = divmod(needed - 1, num_others)
        yield number, -iteration


def _waits(network: Network) -> Iterator[tuple[Reason, str, str, str, tuple[int, int, int]]]:
    """Yield (reason, name, waited for, waiting, rates) of edges, credits and concurrency limits."""
    in_order = {name for order in network.orders.values() for name, _ in order}
    for edge in network.edges:
        rates = edge.produced, edge.consumed, edge.initial
        yield Reason.DATA, edge.name, edge.producer, edge.consumer, rates
        if edge.quota is not None:
            back = edge.consumed, edge.produced, edge.quota - edge.initial
            yield Reason.CREDIT, edge.name, edge.consumer, edge.producer, back
    for actor in network.actors:
        # A processor's order already prevents concurrent firings of its actors.
        if actor.most_at_once is not None and actor.name not in in_order:
            once = 1, 1, actor.most_at_once
            yield Reason.ITSELF, actor.name, actor.name, actor.name, once
