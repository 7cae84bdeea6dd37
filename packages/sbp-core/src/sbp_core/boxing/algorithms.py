"""Predict the time of each algorithm of a collective (ring, tree, ...) on the links of a machine.

`boxing.price` takes the fastest where there are no measured times. An algorithm is a list of
rounds; in a round each rank sends one message and receives one. α is the latency of a message, β
the seconds per byte of its link, n the ranks of a group, S the bytes that they share, L = ceil(log2
n). On links of one speed that nobody shares:

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
between ranks of the same place in their nodes, inside the nodes again; likewise at every level of
the tree of links, where each part again uses its fastest algorithm. Messages that share a link in a
round divide its bandwidth, so a ring, which crosses each boundary once, can be faster than an
algorithm of fewer rounds. Additions are not counted: `calibration` measures them.

Here a node is a group of the innermost level of the tree (see `cluster`), whatever the cluster
calls that level.

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
from itertools import pairwise
from typing import NamedTuple

from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Cluster, Link, path_link

_CACHED = 4096


class LinkRates(NamedTuple):
    """The links of a machine.

    Args:
        levels: The link of each level, innermost first, and whether it is shared; see `LinkLevel`.
    """

    levels: tuple[tuple[Link, bool], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> LinkRates:
        """Return the links of a cluster."""
        if cluster.groups:
            return cls(tuple((level.link, level.shared) for level in cluster.levels))
        # Called for each step that is priced, mostly for such a machine.
        return cls(
            (
                (cluster.intra_node, cluster.intra_node_shared),
                (cluster.inter_node, cluster.inter_node_shared),
            )
        )

    @property
    def paths(self) -> tuple[Link, ...]:
        """For each level, the path of a message up to that level if it shares no link."""
        links = tuple(link for link, _ in self.levels)
        if len(links) == 2:
            return links
        return tuple(path_link(links, level) for level in range(len(links)))


class Membership(NamedTuple):
    """The groups of a level that some ranks are in, as far as a collective's time depends on them.

    Args:
        groups: The group of each rank, in order, numbered by first appearance.
        neighbours: Collectives that run at the same time and have ranks in one of these groups,
            this one included.
    """

    groups: tuple[int, ...]
    neighbours: int

    @property
    def num_groups(self) -> int:
        """How many groups they are in."""
        return max(self.groups) + 1


class RankGroup(NamedTuple):
    """Ranks that do a collective together, as far as its time depends on them.

    Args:
        memberships: By level, innermost first, without the whole cluster.
    """

    memberships: tuple[Membership, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.memberships[0].groups)


class TimedAlgorithm(NamedTuple):
    """One algorithm of a collective by its name, and its time in seconds."""

    time_s: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Every rank sends one message, `times` times in a row.

    Args:
        size_bytes: Bytes of the message.
        shift: It goes to the rank this many places further on, ...
        flips: ... or to the rank whose number differs in these bits.
        times: How often it is sent.
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
    elif splits := _splits(group):
        time_s = min(_hierarchical_time_s(kind, split, size, links) for split in splits)
        found.append(TimedAlgorithm(time_s, "hierarchical"))
    return tuple(sorted(found))


def _rounds(kind: StepKind, n: int, size: float) -> Iterator[tuple[str, list[_Round]]]:
    """Yield the name and rounds of each algorithm that has rounds."""
    S = size  # noqa: N806 (the letter of the formulas)
    ring = [_Round(size_bytes=S / n, shift=1, times=n - 1)]
    bits, even = (n - 1).bit_length(), n & (n - 1) == 0
    if kind is StepKind.ALL_TO_ALL:
        blocks = [(1 << bit, _blocks_with(bit, n) * S / n**2) for bit in range(bits)]
        yield "Bruck", [_Round(size_bytes=size, shift=shift) for shift, size in blocks]
    elif kind is StepKind.ALL_REDUCE:
        yield "ring", [*ring, *ring]
        yield "tree", [_Round(size_bytes=S / bits, shift=1, times=2 * bits)]
        # Ranks beyond the largest power of two give their parts to a neighbour, and get the result.
        fold = [] if even else [_Round(size_bytes=S, shift=1, times=2)]
        power = n if even else 1 << (bits - 1)
        flips = [1 << bit for bit in range(power.bit_length() - 1)]
        yield "recursive doubling", [*fold, *(_Round(size_bytes=S, flips=flip) for flip in flips)]
        halves = [_Round(size_bytes=S * flip / power, flips=flip, times=2) for flip in flips]
        yield "halving-doubling", [*fold, *halves]
    else:
        yield "ring", ring
        doubling = [_Round(size_bytes=S * (1 << bit) / n, flips=1 << bit) for bit in range(bits)]
        if even:
            gathers = kind is StepKind.ALL_GATHER
            yield "recursive doubling" if gathers else "recursive halving", doubling
        elif kind is StepKind.ALL_GATHER:
            shifts = [1 << bit for bit in range(bits)]
            yield "Bruck", [_Round(size_bytes=S * min(m, n - m) / n, shift=m) for m in shifts]


def _blocks_with(bit: int, n: int) -> int:
    """Return how many of 0 .. n - 1 have a bit set."""
    period = 2 << bit
    return n // period * (period // 2) + max(0, n % period - period // 2)


class _Load(NamedTuple):
    """Messages of one round at one level.

    Args:
        at_once: The most messages that pass one link there.
        ends_here: Whether any message goes no further out.
    """

    at_once: int
    ends_here: bool


@lru_cache(maxsize=_CACHED)
def _loads(levels: tuple[tuple[int, ...], ...], shift: int, flips: int) -> tuple[_Load, ...]:
    """Return the load of each level in one round.

    Args:
        levels: The group of each rank, level by level, without the whole cluster.
        shift: See `_Round`.
        flips: See `_Round`.
    """
    n, outermost = len(levels[0]), len(levels)
    # If n is not a power of two, only ranks below the largest one flip bits; the others are idle.
    power = n if n & (n - 1) == 0 else 1 << ((n - 1).bit_length() - 1)
    # By level: messages inside each node, and then messages that leave each group of the level
    # below, however far out they go.
    passing: list[Counter[int]] = [Counter() for _ in range(outermost + 1)]
    ends: set[int] = set()
    for place in range(power if flips else n):
        partner = place ^ flips if flips else (place + shift) % n
        level = 0
        while level < outermost and levels[level][place] != levels[level][partner]:
            passing[level + 1][levels[level][place]] += 1
            level += 1
        if not level:
            passing[0][levels[0][place]] += 1
        ends.add(level)
    return tuple(
        _Load(max(counts.values(), default=0), level in ends)
        for level, counts in enumerate(passing)
    )


def _round_time_s(one: _Round, group: RankGroup, links: LinkRates) -> float:
    """Return the time of the slowest message.

    Messages that are under way on a shared link take turns there. A message is as fast as the
    slowest link that it passes; see `cluster`.
    """
    memberships = group.memberships
    loads = _loads(tuple(of.groups for of in memberships), one.shift, one.flips)
    time_s = passing_s = 0.0
    for level, ((link, is_shared), load) in enumerate(zip(links.levels, loads, strict=True)):
        neighbours = memberships[max(level - 1, 0)].neighbours
        sharers = load.at_once * neighbours if is_shared else 1
        own_s = sharers * one.size_bytes / link.bytes_per_s
        passing_s = max(own_s, passing_s) if level > 1 else own_s
        if load.ends_here:
            time_s = max(time_s, link.latency_s + passing_s)
    return one.times * time_s


def _direct_time_s(group: RankGroup, size: float, links: LinkRates) -> float:
    """Return the time if each rank sends each other its part, one after the other.

    A rank is busy with its own messages, a shared link with the messages of all its users.
    """
    n = group.size
    message = size / n**2
    memberships = group.memberships
    # Ranks whose groups have equal numbers of members at each level take the same time.
    counts = [Counter(of.groups) for of in memberships]
    alike = {
        tuple(count[of.groups[place]] for count, of in zip(counts, memberships, strict=True))
        for place in range(n)
    }
    levels, paths = links.levels, links.paths
    times: list[float] = [0.0]
    for members in alike:
        inside = (1, *members, n)
        sent = [more - less for less, more in pairwise(inside)]
        times.append(
            sum(
                count * (path.latency_s + message / path.bytes_per_s)
                for count, path in zip(sent, paths, strict=True)
            )
        )
        for level, (link, is_shared) in enumerate(levels):
            if not is_shared:
                continue
            # Messages of the group whose link it is; a message inside a node goes no further.
            load = members[max(level - 1, 0)] * message * memberships[max(level - 1, 0)].neighbours
            passing = range(level, len(levels) if level else 1)
            times.append(
                sum(
                    sent[far] * (levels[far][0].latency_s + load / link.bytes_per_s)
                    for far in passing
                )
            )
    return max(times)


class _Split(NamedTuple):
    """A group in equal parts, for an algorithm inside the parts and one between them.

    Args:
        inside: Ranks of one group of a level; the distinct ones.
        between: One rank of each such group.
        num_members: Ranks of one group: as many `between` run at once.
    """

    inside: tuple[RankGroup, ...]
    between: RankGroup
    num_members: int


@lru_cache(maxsize=_CACHED)
def _splits(group: RankGroup) -> tuple[_Split, ...]:
    """Return the ways to do a collective inside the groups of a level, and between them.

    ranks of a group          0 1 | 2 3 || 4 5 | 6 7      nodes of two, racks of four
    inside, between nodes     (0 1) (2 3) (4 5) (6 7)     (0 2 4 6) (1 3 5 7)
    inside, between racks     (0 1 2 3) (4 5 6 7)         (0 4) (1 5) (2 6) (3 7)
    """
    memberships = group.memberships
    found = []
    for level, here in enumerate(memberships):
        sizes = {*Counter(here.groups).values()}
        is_new = level == 0 or here.groups != memberships[level - 1].groups
        if not 1 < here.num_groups < group.size or len(sizes) > 1 or not is_new:
            continue
        parts = [
            [place for place, number in enumerate(here.groups) if number == wanted]
            for wanted in range(here.num_groups)
        ]
        inside = {RankGroup(tuple(_part(of, part) for of in memberships)): None for part in parts}
        heads = [part[0] for part in parts]
        # Each rank of a group of this level, or of a smaller one, is in a separate collective.
        at_once = [max(Counter(of.groups).values()) for of in memberships[:level]]
        at_once += [len(parts[0])] * (len(memberships) - level)
        between = RankGroup(
            tuple(_part(of, heads, count) for of, count in zip(memberships, at_once, strict=True))
        )
        found.append(_Split(tuple(inside), between, len(parts[0])))
    return tuple(found)


def _part(of: Membership, places: list[int], at_once: int = 1) -> Membership:
    """Return the membership of some of the ranks, with `at_once` such parts at work."""
    numbers: dict[int, int] = {}
    groups = tuple(numbers.setdefault(of.groups[place], len(numbers)) for place in places)
    return Membership(groups, of.neighbours * at_once)


def _hierarchical_time_s(kind: StepKind, split: _Split, size: int, links: LinkRates) -> float:
    """Return the time of the best algorithms inside groups and between them, one after the other.

    Args:
        kind: The whole collective.
        split: Its parts.
        size: S of the whole collective.
        links: Links of the machine.
    """

    def inside_s(kind: StepKind) -> float:
        return max(timed_algorithms(kind, one, size, links)[0].time_s for one in split.inside)

    # Ranks with one place in their groups share one part of S, of which there are `num_members`.
    part = -(-size // split.num_members)
    between_s = timed_algorithms(kind, split.between, part, links)[0].time_s
    if kind is not StepKind.ALL_REDUCE:
        return inside_s(kind) + between_s
    return inside_s(StepKind.REDUCE_SCATTER) + between_s + inside_s(StepKind.ALL_GATHER)
