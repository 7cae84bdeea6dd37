"""`Network`: a synchronous dataflow network: actors, edges with tokens and quotas, and processors.

A compiled plan becomes one (`sbp_core.compile.plan_network`), to find deadlocks and predict times.

    data      producer -- produced | initial tokens | consumed --> consumer
    credit    producer <-- produced | quota - initial | consumed -- consumer

A quota limits the tokens of an edge. It is an edge back that carries the free places (credits). The
place of a token is taken when the producer's firing starts, and freed when the consumer's firing
ends, so the tokens that a firing reads or writes count as alive throughout. An order fixes the
sequence in which a processor starts its firings; it repeats in each iteration.

Source: Lee and Messerschmitt, "Synchronous Data Flow", Proc. IEEE 75(9), 1987. Orders and the edges
that they stand for: Sriram and Bhattacharyya, "Embedded Multiprocessors", 2nd ed., ch. 5 and 7.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import TypeAlias

from sbp_core.errors import SbpValueError

#: A time in seconds. Results for integers and fractions are exact.
Seconds: TypeAlias = int | Fraction | float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowActor:
    """An actor: a node that fires.

    Args:
        name: Unique in its network.
        duration_s: The time of one firing, in seconds, >= 0.
        most_at_once: Most concurrent firings, >= 1; None if there is no limit.
    """

    name: str
    duration_s: Seconds = 0
    most_at_once: int | None = 1

    def __post_init__(self) -> None:
        # `not >=` refuses NaN, too; an endless firing would make each period endless.
        is_bad = not self.duration_s >= 0 or self.duration_s == float("inf")
        if is_bad or (self.most_at_once is not None and self.most_at_once < 1):
            raise SbpValueError(
                f"an actor of {self.duration_s} s with {self.most_at_once} firings at once",
                where=f"actor {self.name!r}",
                accepted="a finite duration >= 0; at least one firing at once, or None",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEdge:
    """A first-in first-out buffer between two actors, or from an actor to itself.

    Args:
        name: Unique in its network.
        producer, consumer: Names of actors.
        produced, consumed: Tokens a firing, >= 1.
        initial: Tokens before the first firing, >= 0.
        quota: The most live tokens, including those of running firings; None if unbounded.
        token_bytes: Memory of a token, >= 0.
    """

    name: str
    producer: str
    consumer: str
    produced: int = 1
    consumed: int = 1
    initial: int = 0
    quota: int | None = None
    token_bytes: int = 0

    def __post_init__(self) -> None:
        is_bad = min(self.produced, self.consumed) < 1 or min(self.initial, self.token_bytes) < 0
        if is_bad or (self.quota is not None and self.quota < self.initial):
            raise SbpValueError(
                f"produces {self.produced}, consumes {self.consumed}, begins with {self.initial}, "
                f"quota {self.quota}, {self.token_bytes} bytes a token",
                where=f"edge {self.name!r}",
                accepted="rates >= 1, initial tokens and bytes >= 0, a quota that holds the "
                "initial tokens, or None",
            )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Actors that exchange tokens.

    Args:
        actors: The actors, with unique names.
        edges: The edges, with unique names.
        orders: For each processor the firings of an iteration, as (actor, index), in the order in
            which it starts them, one after the other. An actor may be on several processors at
            once, or on none: then it fires as soon as possible. An order has all firings of an
            actor or none.
    """

    actors: tuple[FlowActor, ...]
    edges: tuple[FlowEdge, ...]
    orders: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, names in (
            ("actors", [actor.name for actor in self.actors]),
            ("edges", [edge.name for edge in self.edges]),
        ):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise SbpValueError(f"several {kind} are called {twice}", accepted="unique names")
        for edge in self.edges:
            unknown = sorted({edge.producer, edge.consumer} - self.by_name.keys())
            if unknown:
                raise SbpValueError(
                    f"there is no actor {unknown}",
                    where=f"edge {edge.name!r}",
                    accepted=f"{len(self.actors)} actors: {sorted(self.by_name)[:8]}",
                )
        for processor, order in self.orders.items():
            indices: dict[str, int] = defaultdict(int)
            for name, index in order:
                if name not in self.by_name or index != indices[name]:
                    raise SbpValueError(
                        f"firing {index} of {name!r} is not due there",
                        where=f"the order of {processor!r}",
                        accepted="actors of the network, each with its firings 0, 1, ... in turn",
                    )
                indices[name] += 1

    @cached_property
    def by_name(self) -> Mapping[str, FlowActor]:
        """Each actor by name."""
        return {actor.name: actor for actor in self.actors}


# Rates.

#: The most firings in an iteration; larger networks are refused: if rates multiply along a chain,
#: the number is the product of all of them.
MOST_FIRINGS = 10_000_000


def repetitions(network: Network) -> Mapping[str, int]:
    """Return how often each actor fires in an iteration: the smallest possible numbers.

    After an iteration, each edge holds as many tokens as before.

        theorem    a network can go on for ever in bounded memory only if there are q > 0 with
                   q[producer] * produced = q[consumer] * consumed    for every edge.
                   In each connected part the smallest such integers are unique.

    One walk over a spanning tree finds the only candidates. An edge that they do not satisfy closes
    a cycle on which the product of the rates is not one: tokens would pile up or run out.

    Source: Lee and Messerschmitt, "Static Scheduling of Synchronous Data Flow Programs for Digital
    Signal Processing", IEEE Trans. Computers C-36(1), 1987.

    Connected parts that share no edge have no common rate: each fires as often as orders list its
    actors; if no order does, as seldom as possible.

    Raises:
        SbpValueError: no numbers satisfy all edges (names the contradictory cycle of edges); an
            iteration has more than `MOST_FIRINGS`; or an order lacks firings of its actors.
    """
    near: dict[str, list[tuple[FlowEdge, str, Fraction]]] = defaultdict(list)
    for edge in network.edges:
        ratio = Fraction(edge.produced, edge.consumed)
        near[edge.producer].append((edge, edge.consumer, ratio))
        near[edge.consumer].append((edge, edge.producer, 1 / ratio))
    listed: dict[str, int] = {}
    for order in network.orders.values():
        listed |= Counter(name for name, _ in order)
    counts: dict[str, int] = {}
    for root in network.by_name:
        if root not in counts:
            part = _part(network, root, near)
            times = max(1, *(listed.get(name, 0) // count for name, count in part.items()))
            counts.update((name, times * count) for name, count in part.items())
    total = sum(counts.values())
    if total > MOST_FIRINGS:
        raise SbpValueError(
            f"an iteration has {total} firings, {max(counts, key=lambda n: counts[n])!r} most",
            accepted=f"at most {MOST_FIRINGS}",
            todo="choose rates that have more factors in common",
        )
    for processor, order in network.orders.items():
        for name, count in Counter(name for name, _ in order).items():
            if count != counts[name]:
                raise SbpValueError(
                    f"{name!r} has {count} firings in the order",
                    where=f"the order of {processor!r}",
                    accepted=f"{counts[name]}: all its firings of an iteration",
                )
    return counts


def _part(
    network: Network, root: str, near: Mapping[str, list[tuple[FlowEdge, str, Fraction]]]
) -> Mapping[str, int]:
    """Return the repetitions of the connected part of a root, ignoring the direction of edges."""
    rates = {root: Fraction(1)}
    tree: dict[str, tuple[FlowEdge, str]] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        for edge, other, ratio in near.get(name, ()):
            if other not in rates:
                rates[other] = rates[name] * ratio
                tree[other] = edge, name
                todo.append(other)
            elif rates[other] != rates[name] * ratio:
                raise _contradiction(edge, tree)
    scale = lcm(*(rate.denominator for rate in rates.values()))
    counts = {name: int(rate * scale) for name, rate in rates.items()}
    common = gcd(*counts.values())
    return {name: count // common for name, count in counts.items()}


def _contradiction(edge: FlowEdge, tree: Mapping[str, tuple[FlowEdge, str]]) -> SbpValueError:
    """Return the error that names the cycle which an edge closes with the tree."""

    def way_up(name: str) -> list[tuple[FlowEdge, str]]:
        found = []
        while name in tree:
            found.append((tree[name][0], name))
            name = tree[name][1]
        return found

    # From the consumer up to the common ancestor, and down to the producer.
    up, down = way_up(edge.consumer), way_up(edge.producer)
    while up and down and up[-1] == down[-1]:
        up.pop()
        down.pop()
    cycle = [(edge, edge.producer), *up]
    for one, name in reversed(down):
        cycle.append((one, one.consumer if one.producer == name else one.producer))
    rate, lines = Fraction(1), []
    for one, start in cycle:
        forth = start == one.producer
        end = one.consumer if forth else one.producer
        factor = Fraction(one.produced, one.consumed)
        rate *= factor if forth else 1 / factor
        lines.append(
            f"edge {one.name!r}: {one.producer!r} produces {one.produced}, {one.consumer!r} "
            f"consumes {one.consumed}, so {end!r} fires {rate} times for one {edge.producer!r}"
        )
    return SbpValueError(
        f"the rates contradict each other: for one firing of {edge.producer!r} it would have to "
        f"fire {rate} times",
        where=lines,
        accepted="rates whose product is 1 around each cycle of edges",
    )
