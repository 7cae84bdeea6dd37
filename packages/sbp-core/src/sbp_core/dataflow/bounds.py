"""Bound the memory that a dataflow network can need, whatever the durations of its actors.

`memory_bound` takes a network without deadlock. So far only tests call it.

Let s[f] and e[f] count how often a firing f of one iteration has started and ended. The reachable
counts are described by inequalities between two of them, each with a whole number:

    e[f] <= s[f]                      a firing ends after it starts
    s[g] <= e[f] + delay              g waits for f
    s[f] <= s[f'], e[f] <= e[f']      firings of an actor, f' before f, begin and end in turn

    theorem    in a live marked graph all counts that satisfy these inequalities are reached by some
               execution (Commoner et al. 1971; Murata, "Petri Nets", Proc. IEEE 77(4), 1989, VI)

The bytes of the live tokens are a linear function of the counts: initial tokens, plus tokens of
started firings, minus tokens read in ended firings. Maximising it under difference constraints is
the dual of a minimum-cost flow: each ending firing supplies the bytes that it frees, each starting
firing demands the bytes that it makes, and bytes flow along the inequalities at a cost of `delay`.
So the peak is the cost of the flow, and the node potentials are counts at which it is reached. For
one edge, by Commoner et al., its most tokens are the fewest on a cycle through it. The flow is
found by successive shortest paths, about one for each firing: for thousands of firings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from sbp_core.dataflow.actor_network import FlowEdge, Network
from sbp_core.dataflow.expansion import Expansion, expand
from sbp_core.dataflow.liveness import check_live
from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak of live tokens or bytes over all executions, and a moment at which it is reached.

    Args:
        amount: Bytes, or tokens.
        started, ended: The firings of each actor that have started and ended at that moment.
    """

    amount: int
    started: Mapping[str, int]
    ended: Mapping[str, int]


def edge_bound(network: Network, name: str) -> Peak | None:
    """Return the most tokens that can be alive on an edge; None if there is no bound.

    Raises:
        SbpValueError: the network is not live, or there is no such edge.
    """
    if all(edge.name != name for edge in network.edges):
        raise SbpValueError(f"there is no edge {name!r}")
    edges = [replace(edge, token_bytes=int(edge.name == name)) for edge in network.edges]
    return memory_bound(replace(network, edges=tuple(edges)))


def memory_bound(network: Network) -> Peak | None:
    """Return the most bytes of tokens that can be alive at once; None if there is no bound.

    Raises:
        SbpValueError: the network is not live, or its rates are not consistent.
    """
    check_live(network)
    expansion = expand(network)
    flow = _Flow(expansion)
    num = len(expansion.duration_s)
    for edge in network.edges:
        if edge.token_bytes:
            _supply(flow, expansion, edge)
    if not flow.run():
        return None
    potentials = flow.potentials
    # Adding the same number to all counts adds iterations, so it is allowed.
    least = min(potentials, default=0)

    def total(name: str, side: int) -> int:
        nodes = range(expansion.first[name], expansion.first[name] + expansion.counts[name])
        return sum(potentials[side * num + node] - least for node in nodes)

    started = {name: total(name, 0) for name in expansion.counts}
    ended = {name: total(name, 1) for name in expansion.counts}
    amount = sum(
        edge.token_bytes
        * (
            edge.initial
            + edge.produced * started[edge.producer]
            - edge.consumed * ended[edge.consumer]
        )
        for edge in network.edges
    )
    return Peak(amount=amount, started=started, ended=ended)


def _supply(flow: _Flow, expansion: Expansion, edge: FlowEdge) -> None:
    """Set the supply of an edge's consumer firings and the demand of its producer firings."""
    num = len(expansion.duration_s)
    for index in range(expansion.counts[edge.consumer]):
        node = num + expansion.first[edge.consumer] + index
        flow.excess[node] += edge.consumed * edge.token_bytes
    for index in range(expansion.counts[edge.producer]):
        flow.excess[expansion.first[edge.producer] + index] -= edge.produced * edge.token_bytes


class _Flow:
    """A minimum-cost flow on arcs without capacities.

    Attributes:
        excess: For each node the amount that it still has to send; negative if it demands.
        potentials: A number for each node; along an arc it grows by at most the cost of the arc.
    """

    def __init__(self, expansion: Expansion) -> None:
        num = len(expansion.duration_s)
        #: Firing f starts as node f, and ends as node num + f.
        arcs = [(node, num + node, 0) for node in range(num)]
        for on, waiting, delay in zip(
            expansion.on, expansion.waiting, expansion.delay, strict=True
        ):
            arcs.append((num + on, waiting, delay))
        for name, count in expansion.counts.items():
            for side in (0, num):
                base = side + expansion.first[name]
                arcs += [(base + i - 1, base + i, 0) for i in range(1, count)]
                arcs.append((base + count - 1, base, 1))
        self.excess = [0] * (2 * num)
        self.potentials = [0] * (2 * num)
        # For each arc a forward entry, at an even number, and a backward one, which removes flow.
        self._ends: list[int] = []
        self._costs: list[int] = []
        self._room: list[float] = []
        self._leaving: list[list[int]] = [[] for _ in range(2 * num)]
        for start, end, cost in arcs:
            for a, b, price, room in ((start, end, cost, float("inf")), (end, start, -cost, 0)):
                self._leaving[a].append(len(self._ends))
                self._ends.append(b)
                self._costs.append(price)
                self._room.append(room)

    def run(self) -> bool:
        """Send all supply to the demand; return whether that is possible."""
        while sources := [node for node, amount in enumerate(self.excess) if amount > 0]:
            found = self._nearest(sources)
            if found is None:
                return False
            self._send(*found)
        return True

    def _nearest(self, sources: list[int]) -> tuple[int, dict[int, int]] | None:
        """Find the cheapest path from any source to any node with demand; raise the potentials."""
        distance: dict[int, int] = dict.fromkeys(sources, 0)
        by: dict[int, int] = {}
        done: set[int] = set()
        heap = [(0, node) for node in sources]
        while heap:
            far, node = heappop(heap)
            if node in done:
                continue
            done.add(node)
            if self.excess[node] < 0:
                for other in range(len(self.potentials)):
                    self.potentials[other] += min(distance.get(other, far), far)
                return node, by
            for entry in self._leaving[node]:
                if self._room[entry] <= 0:
                    continue
                other = self._ends[entry]
                # The cost reduced by the potentials; never below 0.
                step = self._costs[entry] + self.potentials[node] - self.potentials[other]
                if other not in distance or far + step < distance[other]:
                    distance[other] = far + step
                    by[other] = entry
                    heappush(heap, (far + step, other))
        return None

    def _send(self, node: int, by: dict[int, int]) -> None:
        way, end = [], node
        while node in by:
            way.append(by[node])
            node = self._ends[by[node] ^ 1]
        amount = min([self.excess[node], -self.excess[end], *(self._room[e] for e in way)])
        for entry in way:
            self._room[entry] -= amount
            self._room[entry ^ 1] += amount
        self.excess[node] -= int(amount)
        self.excess[end] += int(amount)
