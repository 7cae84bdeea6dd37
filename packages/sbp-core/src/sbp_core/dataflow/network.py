"""Networks: actors, edges with initial tokens and quotas, and orders in which processors fire.

    data      producer -- produced | initial tokens | consumed --> consumer
    credit    producer <-- produced | quota - initial | consumed -- consumer

A quota is an edge back: the credits that are left. Place for a token is taken when the producer's
firing starts, and given back when the consumer's ends, so that what a firing reads or writes counts
as alive all the while. An order says in which turn a processor starts its firings; it begins anew
with each iteration.

Source: Lee and Messerschmitt, "Synchronous Data Flow", Proc. IEEE 75(9), 1987. Orders and the edges
that they stand for: Sriram and Bhattacharyya, "Embedded Multiprocessors", 2nd ed., ch. 5 and 7.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

from sbp_core.errors import SbpValueError

#: A time in seconds. What is computed of integers and fractions is exact.
Seconds: TypeAlias = int | Fraction | float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowActor:
    """What fires.

    Args:
        name: Unique in its network.
        duration_s: Of one firing, in seconds, >= 0.
        most_at_once: How many firings may be under way at once, >= 1; None if there is no limit.
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
        quota: The most tokens that may be alive, those under way included; None if unbounded.
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
        actors: With unique names.
        edges: With unique names.
        orders: For each processor the firings of an iteration, as (actor, index), in the order in
            which it starts them, one after the other. An actor may be on several processors at
            once, and on none: then it fires when it can. An order with an actor has all its
            firings in it.
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
