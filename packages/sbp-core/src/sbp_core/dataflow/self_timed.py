"""Simulation of a dataflow network in time: each firing begins as early as possible (self-timed).

The executor counts tokens, and knows neither iterations nor the homogeneous network, so its results
are independent of the analyses: tests compare them. With integers or fractions it is exact.

If no part of a network can run ahead for ever, it has finitely many states, so its execution
returns to one of them: from there on it repeats, and the time between the two visits is the period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush

from sbp_core.dataflow.actor_network import FlowActor, FlowEdge, Network, Seconds, repetitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of an execution.

    Args:
        is_done: Whether all requested firings have happened; else it deadlocked.
        end_s: Time of the last end of a firing, in seconds.
        period_s: Time of an iteration in the steady state; None if it was not reached.
        most_tokens: The most tokens that were alive, by edge.
        peak_bytes: The most bytes that were alive at once.
    """

    is_done: bool
    end_s: Seconds
    period_s: Seconds | None
    most_tokens: Mapping[str, int]
    peak_bytes: int


def execute(network: Network, num_iterations: int) -> Execution:
    """Execute a network until it repeats itself, at most so many iterations.

    Raises:
        SbpValueError: its rates are not consistent.
    """
    counts = repetitions(network)
    run = SelfTimed(network, {name: n * num_iterations for name, n in counts.items()})
    # A visit of a state is an event after which one more iteration of the first actor is over.
    clock = next(iter(counts))
    seen: dict[object, tuple[Seconds, int]] = {}
    iterations, period_s = 0, None
    while run.step():
        done = run.finished[clock] // counts[clock]
        if done > iterations:
            iterations = done
            state = run.state()
            if state in seen:
                time_s, before = seen[state]
                elapsed = run.now - time_s
                count = done - before
                is_float = isinstance(elapsed, float)
                period_s = elapsed / count if is_float else Fraction(elapsed) / count
                break
            seen[state] = run.now, done
    return Execution(
        is_done=period_s is not None or run.finished == run.limits,
        end_s=run.now,
        period_s=period_s,
        most_tokens=dict(run.most_tokens),
        peak_bytes=run.peak_bytes,
    )


class SelfTimed:
    """A running execution of a network.

    Args:
        network: The network.
        limits: How often each actor may fire.
    """

    def __init__(self, network: Network, limits: Mapping[str, int]) -> None:
        self.network = network
        self.limits = dict(limits)
        self.now: Seconds = 0
        self.started = dict.fromkeys(network.by_name, 0)
        self.finished = dict.fromkeys(network.by_name, 0)
        self.most_tokens = {edge.name: edge.initial for edge in network.edges}
        self._alive = dict(self.most_tokens)
        self._bytes = sum(edge.initial * edge.token_bytes for edge in network.edges)
        self.peak_bytes = self._bytes
        self._under_way: list[tuple[Seconds, int, str]] = []
        self._numbers = {name: number for number, name in enumerate(network.by_name)}
        self._inputs: dict[str, list[FlowEdge]] = defaultdict(list)
        self._outputs: dict[str, list[FlowEdge]] = defaultdict(list)
        for edge in network.edges:
            self._inputs[edge.consumer].append(edge)
            self._outputs[edge.producer].append(edge)
        self._processors: dict[str, list[str]] = defaultdict(list)
        for processor, order in network.orders.items():
            for name in dict.fromkeys(name for name, _ in order):
                self._processors[name].append(processor)
        #: The number of firings of its order that each processor has started, and ended.
        self._begun = dict.fromkeys(network.orders, 0)
        self._ended = dict.fromkeys(network.orders, 0)
        self._ready = list(network.by_name)

    def step(self) -> bool:
        """Begin all possible firings, then advance to the next end; False if none runs."""
        while self._ready:
            name = self._ready.pop()
            while self.can_start(name):
                self.start(name)
        if not self._under_way:
            return False
        self.now = self._under_way[0][0]
        while self._under_way and self._under_way[0][0] == self.now:
            self.finish(heappop(self._under_way)[2])
        return True

    def state(self) -> object:
        """Return everything that later events depend on, except the time."""
        under_way = sorted((end - self.now, number) for end, number, _ in self._under_way)
        positions = [self._begun[name] % len(order) for name, order in self.network.orders.items()]
        # Live tokens and running firings; the unread tokens follow from both.
        return tuple(self._alive.values()), tuple(under_way), tuple(positions)

    def can_start(self, name: str) -> bool:
        """Whether an actor has data, credits, and its turn."""
        actor = self.network.by_name[name]
        if self.started[name] >= self.limits[name] or not self._may_overlap(actor):
            return False
        for edge in self._inputs[name]:
            there = edge.initial + edge.produced * self.finished[edge.producer]
            if there < edge.consumed * (self.started[name] + 1):
                return False
        for edge in self._outputs[name]:
            if edge.quota is not None and self._alive[edge.name] + edge.produced > edge.quota:
                return False
        return True

    def _may_overlap(self, actor: FlowActor) -> bool:
        for processor in self._processors[actor.name]:
            order = self.network.orders[processor]
            begun = self._begun[processor]
            if self._ended[processor] != begun or order[begun % len(order)][0] != actor.name:
                return False
        under_way = self.started[actor.name] - self.finished[actor.name]
        return actor.most_at_once is None or under_way < actor.most_at_once

    def start(self, name: str) -> None:
        """Begin a firing: take its turn and the places for its results."""
        self.started[name] += 1
        for processor in self._processors[name]:
            self._begun[processor] += 1
        for edge in self._outputs[name]:
            self._alive[edge.name] += edge.produced
            self._bytes += edge.produced * edge.token_bytes
            self.most_tokens[edge.name] = max(self.most_tokens[edge.name], self._alive[edge.name])
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        end_s = self.now + self.network.by_name[name].duration_s
        heappush(self._under_way, (end_s, self._numbers[name], name))

    def finish(self, name: str) -> None:
        """End a firing: pass on its results, and free the places of the tokens that it read."""
        self.finished[name] += 1
        changed = {name}
        for edge in self._inputs[name]:
            self._alive[edge.name] -= edge.consumed
            self._bytes -= edge.consumed * edge.token_bytes
            changed.add(edge.producer)
        changed.update(edge.consumer for edge in self._outputs[name])
        for processor in self._processors[name]:
            self._ended[processor] += 1
            order = self.network.orders[processor]
            changed.add(order[self._ended[processor] % len(order)][0])
        self._ready += sorted(changed, key=self._numbers.__getitem__)
