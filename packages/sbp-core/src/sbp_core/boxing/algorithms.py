"""The algorithms of collectives, and how long each takes on the links of a machine.

An algorithm is a list of rounds; in a round each rank sends one message and receives one. α is the
latency of a message, β the seconds per byte of its link, n the ranks of a group, S the bytes that
they share, L = ceil(log2 n). On links of one speed that nobody shares:

    all-gather        ring                 (n-1) α + (n-1)/n β S
                      recursive doubling   L α + (n-1)/n β S         n a power of two
                      Bruck                L α + (n-1)/n β S         any other n
    reduce-scatter    ring                 (n-1) α + (n-1)/n β S
                      recursive halving    L α + (n-1)/n β S         n a power of two
    all-reduce        ring                 2 (n-1) α + 2 (n-1)/n β S
                      recursive doubling   L (α + β S)               (+ 2 (α + β S) for other n)
                      halving-doubling     2 L α + 2 (n-1)/n β S     (+ 2 (α + β S) for other n)
                      tree                 2 L α + 2 β S             two binary trees, pipelined
    all-to-all        direct               (n-1) (α + β S/n²)
                      Bruck                L α + about L β S/(2 n)

and, where a group has several ranks on each of several nodes, `hierarchical`: inside the nodes,
between ranks of the same place in their nodes, inside the nodes again. Whoever shares a link in a
round divides its bandwidth, so a ring, which crosses each boundary once, can beat an algorithm
of fewer rounds. Adding up is not counted: `calibration` measures it.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19 (2005), sections 4.1 to 4.5 and, for n that are no powers of two, 4.5; Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009),
for the ring; Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", TPDS 8 (1997); Sanders, Speck and Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009), which is the tree of NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Cluster, Link

_CACHED = 4096


class LinkRates(NamedTuple):
    """The links of a machine, and which are shared; see `Cluster`."""

    intra: Link
    inter: Link
    intra_shared: bool
    inter_shared: bool

    @classmethod
    def of(cls, cluster: Cluster) -> LinkRates:
        """Return the links of a cluster."""
        return cls(
            cluster.intra_node,
            cluster.inter_node,
            cluster.intra_node_shared,
            cluster.inter_node_shared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that do a collective together, as far as its time depends on them.

    Args:
        nodes: Node of each rank, in order, numbered by first appearance.
        neighbours: Groups that work at the same time and have ranks on one node, this one included.
    """

    nodes: tuple[int, ...]
    neighbours: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return max(self.nodes) + 1


class TimedAlgorithm(NamedTuple):
    """One algorithm of a collective by its name, and its time in seconds."""

    time_s: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Every rank sends one message, `times` times in a row.

    Args:
        size_bytes: Of the message.
        shift: It goes to the rank this many further on, ...
        flips: ... or to the one whose number differs in this bit.
        times: How often.
    """

    size_bytes: float
    shift: int = 0
    flips: int = 0
    times: int = 1


@lru_cache(maxsize=_CACHED)
def timed_algorithms(
    kind: StepKind, group: RankGroup, size: int, links: LinkRates
) -> tuple[TimedAlgorithm, ...]:
    """Return all algorithms for a collective of `size` bytes (S above), the fastest first."""
    if group.size < 2:
        return (TimedAlgorithm(0.0, "nothing to do"),)
    found = [
        TimedAlgorithm(sum(_round_time_s(one, group, links) for one in rounds), name)
        for name, rounds in _rounds(kind, group.size, size)
    ]
    if kind is StepKind.ALL_TO_ALL:
        found.append(TimedAlgorithm(_direct_time_s(group, size, links), "direct"))
    elif 1 < group.num_nodes < group.size and len(set(Counter(group.nodes).values())) == 1:
        found.append(TimedAlgorithm(_hierarchical_time_s(kind, group, size, links), "hierarchical"))
    return tuple(sorted(found))


def _rounds(kind: StepKind, n: int, size: float) -> Iterator[tuple[str, list[_Round]]]:
    """Yield the name and rounds of each algorithm that has rounds."""
    S = size  # noqa: N806 (the letter of the formulas)
    ring = [_Round(size_bytes=S / n, shift=1, times=n - 1)]
    bits, even = (n - 1).bit_length(), n & (n - 1) == 0
    if kind is StepKind.ALL_TO_ALL:
        yield (
            "Bruck",
            [
                _Round(size_bytes=_blocks_with(bit, n) * S / n**2, shift=1 << bit)
                for bit in range(bits)
            ],
        )
    elif kind is StepKind.ALL_REDUCE:
        yield "ring", [*ring, *ring]
        yield "tree", [_Round(size_bytes=S / bits, shift=1, times=2 * bits)]
        # The ranks beyond the largest power of two give theirs to a neighbour, and get the result.
        fold = [] if even else [_Round(size_bytes=S, shift=1, times=2)]
        power = n if even else 1 << (bits - 1)
        inner = range(power.bit_length() - 1)
        yield (
            "recursive doubling",
            [
                *fold,
                *(_Round(size_bytes=S, flips=1 << bit) for bit in inner),
            ],
        )
        yield (
            "halving-doubling",
            [
                *fold,
                *(
                    _Round(size_bytes=S * (1 << bit) / power, flips=1 << bit, times=2)
                    for bit in inner
                ),
            ],
        )
    else:
        yield "ring", ring
        doubling = [_Round(size_bytes=S * (1 << bit) / n, flips=1 << bit) for bit in range(bits)]
        if even:
            gathers = kind is StepKind.ALL_GATHER
            yield "recursive doubling" if gathers else "recursive halving", doubling
        elif kind is StepKind.ALL_GATHER:
            yield (
                "Bruck",
                [
                    _Round(size_bytes=S * min(1 << bit, n - (1 << bit)) / n, shift=1 << bit)
                    for bit in range(bits)
                ],
            )


def _blocks_with(bit: int, n: int) -> int:
    """Return how many of 0 .. n - 1 have a bit set."""
    period = 2 << bit
    return n // period * (period // 2) + max(0, n % period - period // 2)


@lru_cache(maxsize=_CACHED)
def _load(nodes: tuple[int, ...], shift: int, flips: int) -> tuple[int, int]:
    """Return the most messages of one round that one node exchanges inside, and sends outside."""
    n = len(nodes)
    # Where n is no power of two only the ranks below one flip bits; the others look on.
    power = n if n & (n - 1) == 0 else 1 << ((n - 1).bit_length() - 1)
    inside: Counter[int] = Counter()
    outside: Counter[int] = Counter()
    for place in range(power if flips else n):
        partner = place ^ flips if flips else (place + shift) % n
        (inside if nodes[place] == nodes[partner] else outside)[nodes[place]] += 1
    return max(inside.values(), default=0), max(outside.values(), default=0)


def _round_time_s(one: _Round, group: RankGroup, links: LinkRates) -> float:
    inside, outside = _load(group.nodes, one.shift, one.flips)
    time_s = 0.0
    if inside:
        time_s = _shared_s(links.intra, links.intra_shared, one.size_bytes, inside, group)
    if outside:
        time_s = max(
            time_s, _shared_s(links.inter, links.inter_shared, one.size_bytes, outside, group)
        )
    return one.times * time_s


def _shared_s(link: Link, is_shared: bool, size: float, messages: int, group: RankGroup) -> float:
    """Return the time of one of some equal messages that are under way at once."""
    sharers = messages * group.neighbours if is_shared else 1
    return link.latency_s + sharers * size / link.bytes_per_s


def _direct_time_s(group: RankGroup, size: float, links: LinkRates) -> float:
    """Return the time if each rank sends each other its part, one after the other.

    A rank is busy with its own messages; a shared link with all that use it.
    """
    n = group.size
    message = size / n**2
    times: list[float] = [0.0]
    for members in set(Counter(group.nodes).values()):
        near, far = members - 1, n - members
        intra, inter = links.intra, links.inter
        times.append(
            near * (intra.latency_s + message / intra.bytes_per_s)
            + far * (inter.latency_s + message / inter.bytes_per_s)
        )
        load = members * message * group.neighbours
        if near and links.intra_shared:
            times.append(near * (intra.latency_s + load / intra.bytes_per_s))
        if far and links.inter_shared:
            times.append(far * (inter.latency_s + load / inter.bytes_per_s))
    return max(times)


def _hierarchical_time_s(kind: StepKind, group: RankGroup, size: int, links: LinkRates) -> float:
    """Return the time of the best algorithms inside nodes and between them, one after the other."""
    num_nodes = group.num_nodes
    members = group.size // num_nodes
    inside = RankGroup(nodes=(0,) * members, neighbours=group.neighbours)
    between = RankGroup(nodes=tuple(range(num_nodes)), neighbours=members * group.neighbours)
    # The ranks of one place in their nodes share one part of S, of which there are `members`.
    part = -(-size // members)
    if kind is not StepKind.ALL_REDUCE:
        return (
            timed_algorithms(kind, inside, size, links)[0].time_s
            + timed_algorithms(kind, between, part, links)[0].time_s
        )
    return (
        timed_algorithms(StepKind.REDUCE_SCATTER, inside, size, links)[0].time_s
        + timed_algorithms(StepKind.ALL_REDUCE, between, part, links)[0].time_s
        + timed_algorithms(StepKind.ALL_GATHER, inside, size, links)[0].time_s
    )
