"""Random networks of dataflow, and what must hold of each: analyses against execution."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, gcd
from random import Random

from sbp_core.dataflow import (
    Dependency,
    FlowActor,
    FlowEdge,
    Network,
    Reason,
    Seconds,
    SelfTimed,
    critical_cycle,
    dead_cycle,
    execute,
    latency,
    repetitions,
    sufficient_quotas,
)
from sbp_core.errors import SbpValueError

#: Executions that have not come back to a state by then would have to be looked at.
_MOST_ITERATIONS = 20_000


def random_network(seed: int) -> Network:
    """Return a network: mostly consistent, live or not, bounded or not, with orders or without."""
    rng = Random(seed)
    counts = [rng.choice((1, 1, 2, 3, 4)) for _ in range(rng.randint(1, 6))]
    actors = tuple(
        FlowActor(
            name=f"a{i}",
            duration_s=rng.choice((0, 1, 2, 3, 5, 7, Fraction(1, 2), Fraction(7, 3))),
            most_at_once=rng.choice((1, 1, 1, 2, None)),
        )
        for i in range(len(counts))
    )
    # A tree that connects all, in random directions, and some more.
    pairs = [
        rng.choice(((i, j), (j, i))) for i in range(1, len(counts)) for j in [rng.randrange(i)]
    ]
    pairs += [
        (rng.randrange(len(counts)), rng.randrange(len(counts))) for _ in range(rng.randint(0, 3))
    ]
    edges = []
    for number, (i, j) in enumerate(pairs):
        common = gcd(counts[i], counts[j])
        times = rng.choice((1, 1, 2))
        produced, consumed = times * counts[j] // common, times * counts[i] // common
        if rng.random() < 0.01:
            produced += 1
        initial = rng.choice(
            (0, 0, consumed - 1, consumed, rng.randint(0, 2 * produced * consumed))
        )
        quota = initial + produced + consumed - rng.choice((0, 1, times))
        if rng.random() < 0.5:
            quota += rng.randint(0, 2 * produced)
        edges.append(
            FlowEdge(
                name=f"e{number}",
                producer=f"a{i}",
                consumer=f"a{j}",
                produced=produced,
                consumed=consumed,
                initial=initial,
                quota=None if rng.random() < 0.1 else max(initial, quota),
                token_bytes=rng.choice((0, 1, 3, 8)),
            )
        )
    network = Network(actors=actors, edges=tuple(edges))
    try:
        found = repetitions(network)
    except SbpValueError:
        return network
    return replace(network, orders=_orders(rng, found))


def _orders(rng: Random, counts: dict[str, int]) -> dict[str, list[tuple[str, int]]]:
    """Return the orders of up to two processors: their firings shuffled, or as good as in turn."""
    names, orders = list(counts), {}
    for processor in range(rng.choice((0, 0, 1, 2))):
        held = rng.sample(names, rng.randint(1, min(3, len(names))))
        turns = [name for name in held for _ in range(counts[name])]
        if rng.random() < 0.7:
            rng.shuffle(turns)
        seen: Counter[str] = Counter()
        order = []
        for name in turns:
            order.append((name, seen[name]))
            seen[name] += 1
        orders[f"p{processor}"] = order
    return orders


def verify(network: Network) -> str:
    """Check all that the analyses say of a network against its execution; return what it was."""
    try:
        counts = repetitions(network)
    except SbpValueError as error:
        _verify_contradiction(network, error)
        return "inconsistent"
    run = SelfTimed(network, counts)
    while run.step():
        pass
    cycle = dead_cycle(network)
    assert (cycle is None) == (run.finished == counts)
    if cycle is not None:
        _verify_dead(network, cycle, run)
        return "dead"
    assert latency(network) == run.now
    critical = critical_cycle(network)
    _verify_linked(critical.waits)
    if critical.waits:
        spent = sum(network.by_name[wait.on.actor].duration_s for wait in critical.waits)
        assert critical.period_s == Fraction(spent, sum(wait.delay for wait in critical.waits))
    parts = _parts(network)
    assert critical.period_s == max(_executed_period(part) for part in parts)
    _verify_quotas(network, Random(len(network.edges)))
    return "live" if len(parts) == 1 else "live, of several parts"


def _executed_period(network: Network) -> Seconds:
    waits = network.orders or any(edge.consumer != "clock" for edge in network.edges)
    if all(actor.most_at_once is None for actor in network.actors) and not waits:
        return 0  # an actor that waits for nothing, not even for itself, fires all at once
    found = execute(network, _MOST_ITERATIONS).period_s
    assert found is not None, "the execution repeats itself"
    return found


def _verify_contradiction(network: Network, error: SbpValueError) -> None:
    """Check that the edges named close a cycle, and that their rates multiply to more or less."""
    edges = {edge.name: edge for edge in network.edges}
    named = [edges[re.findall(r"edge '(\w+)'", line)[0]] for line in error.where]
    rate, place = Fraction(1), named[0].producer
    for edge in named:
        assert place in (edge.producer, edge.consumer)
        forth = place == edge.producer
        ratio = Fraction(edge.produced, edge.consumed)
        rate *= ratio if forth else 1 / ratio
        place = edge.consumer if forth else edge.producer
    assert place == named[0].producer
    assert rate != 1


def _verify_linked(cycle: Sequence[Dependency]) -> None:
    for wait, following in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert wait.on == following.waiting


def _verify_dead(network: Network, cycle: Sequence[Dependency], run: SelfTimed) -> None:
    """Check that a cycle lacks tokens, and that the quotas said to be enough are."""
    edges = {edge.name: edge for edge in network.edges}
    assert cycle
    _verify_linked(cycle)
    for wait in cycle:
        assert run.started[wait.waiting.actor] <= wait.waiting.number, "none of them has fired"
        assert _needed(network, edges, wait) > wait.on.number, "it cannot fire before the other"
    enough = sufficient_quotas(network)
    if enough is None:
        free = tuple(replace(edge, quota=None) for edge in network.edges)
        assert not execute(replace(network, edges=free), 1).is_done
        return
    assert all(quota > (edges[name].quota or 0) for name, quota in enough.items())
    assert _ends_with(network, enough)
    for name in enough:
        fewer = {other: quota for other, quota in enough.items() if other != name}
        assert not _ends_with(network, fewer), "none of them can be left out"


def _ends_with(network: Network, quotas: Mapping[str, int]) -> bool:
    """Whether an iteration ends with other quotas of some edges."""
    edges = [replace(e, quota=quotas.get(e.name, e.quota)) for e in network.edges]
    return execute(replace(network, edges=tuple(edges)), 1).is_done


def _needed(network: Network, edges: dict[str, FlowEdge], wait: Dependency) -> int:
    """Return how many firings of the other there must have been, by the rules of tokens."""
    turn = wait.waiting.number + 1
    if wait.reason is Reason.TURN:
        order = list(network.orders[wait.name])
        assert order.index(tuple(wait.on)) + 1 == order.index(tuple(wait.waiting))
        return wait.on.number + 1
    if wait.reason is Reason.ITSELF:
        return turn - (network.by_name[wait.name].most_at_once or 0)
    edge = edges[wait.name]
    if wait.reason is Reason.DATA:
        assert (wait.on.actor, wait.waiting.actor) == (edge.producer, edge.consumer)
        return ceil(Fraction(edge.consumed * turn - edge.initial, edge.produced))
    assert (wait.on.actor, wait.waiting.actor) == (edge.consumer, edge.producer)
    assert edge.quota is not None
    return ceil(Fraction(edge.initial + edge.produced * turn - edge.quota, edge.consumed))


def _verify_quotas(network: Network, rng: Random) -> None:
    """Check that no execution exceeds a quota: neither in time, nor in random orders."""
    for most_tokens in (execute(network, 20).most_tokens, _shuffled(network, rng)):
        for edge in network.edges:
            assert edge.quota is None or most_tokens[edge.name] <= edge.quota


def _shuffled(network: Network, rng: Random) -> Mapping[str, int]:
    """Execute three iterations in a random order of starts and ends; return the most tokens."""
    run = SelfTimed(network, {name: 3 * n for name, n in repetitions(network).items()})
    while True:
        starts = [name for name in network.by_name if run.can_start(name)]
        ends = [name for name in network.by_name if run.finished[name] < run.started[name]]
        if not starts and not ends:
            assert run.finished == run.limits, "a live network is live in any order"
            return run.most_tokens
        choice = rng.randrange(len(starts) + len(ends))
        if choice < len(starts):
            run.start(starts[choice])
        else:
            run.finish(ends[choice - len(starts)])


def _parts(network: Network) -> list[Network]:
    """Return the parts in which every actor waits for every other, each a network of its own.

    A part alone might need fewer firings until it repeats itself. A clock, for which nobody waits,
    fires once for each iteration of the whole network.
    """
    reach = {name: {name} for name in network.by_name}
    near = [(edge.producer, edge.consumer) for edge in network.edges]
    near += [(edge.consumer, edge.producer) for edge in network.edges if edge.quota is not None]
    for order in network.orders.values():
        names = [name for name, _ in order]
        near += zip(names, names[1:] + names[:1], strict=True)
    grown = True
    while grown:
        grown = False
        for start, end in near:
            if not reach[start] >= reach[end]:
                reach[start] |= reach[end]
                grown = True
    parts = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in network.by_name
    }
    counts = repetitions(network)
    return [
        Network(
            actors=(
                FlowActor(name="clock", most_at_once=None),
                *(actor for actor in network.actors if actor.name in part),
            ),
            edges=(
                *(edge for edge in network.edges if {edge.producer, edge.consumer} <= part),
                *(
                    FlowEdge(name=name, producer=name, consumer="clock", consumed=counts[name])
                    for name in sorted(part)
                ),
            ),
            orders={p: order for p, order in network.orders.items() if order[0][0] in part},
        )
        for part in sorted(parts, key=sorted)
    ]
