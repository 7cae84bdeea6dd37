"""Consistent rates: how often every actor fires until all edges hold what they began with.

    theorem    a network can go on for ever in bounded memory only if there are q > 0 with
               q[producer] * produced = q[consumer] * consumed    for every edge.
               In each connected part the smallest such integers are unique.

One walk over a spanning tree finds the only candidates; an edge that they do not fit closes a cycle
around which the rates multiply to something else than one: tokens would pile up or run out.

Source: Lee and Messerschmitt, "Static Scheduling of Synchronous Data Flow Programs for Digital
Signal Processing", IEEE Trans. Computers C-36(1), 1987.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

from sbp_core.dataflow.network import FlowEdge, Network
from sbp_core.errors import SbpValueError

#: From this number of firings in an iteration on, a network is refused: rates that multiply along
#: a chain make it grow with the product of all of them.
MOST_FIRINGS = 10_000_000


def repetitions(network: Network) -> Mapping[str, int]:
    """Return how often each actor fires in an iteration: the smallest numbers that there are.

    Connected parts that share no edge have no common rate: each fires as often as orders list its
    actors; in none, as seldom as it can.

    Raises:
        SbpValueError: no numbers fit, with the cycle of edges that contradicts itself; an iteration
            has more than `MOST_FIRINGS`; or an order lacks firings of its actors.
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
    """Return the repetitions of the part that a root is connected to, whichever way edges lead."""
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

    # From the consumer up to where both ways meet, and down to the producer.
    up, down = way_up(edge.consumer), way_up(edge.producer)
    while up and down and up[-1] == down[-1]:
        up.pop()
        down.pop()
    cycle = [(edge, edge.producer)]
    cycle += [(one, name) for one, name in up]
    cycle += [(one, one.consumer if one.producer == name else one.producer)
              for one, name in reversed(down)]  # fmt: skip
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
