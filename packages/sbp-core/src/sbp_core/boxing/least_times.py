"""What every route on a mesh takes at least, in seconds for each byte of the tensor, all at once.

Routes have the fewest bytes (`boxing.router`), so between two states no route is faster than the
fastest of those with the fewest bytes, and none of these faster than its steps without latencies:

    local step    writing its result
    collective    the fastest algorithm on links without latency, and writing its result
    transfer      what the fullest rank receives, as near as can be, and on average what has to
                  cross nodes; and writing its result

All of this grows with the tensor, so it is found once for all tensors whose dims are split alike:
shortest paths between all states, by bytes, then by seconds. Latencies and launches are left out,
and so is who sends which of several copies; a search may add the least that any route has of these.

Source: Floyd, "Algorithm 97: shortest path", Communications of the ACM 5 (1962).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from sbp_core.boxing.algorithms import LinkRates, timed_algorithms
from sbp_core.boxing.price import rank_groups
from sbp_core.boxing.routing.collectives import KINDS, Collectives, collectives
from sbp_core.boxing.routing.layout import (
    Ints,
    Layout,
    common_lengths,
    intervals,
    num_ranks,
    numbers,
)
from sbp_core.boxing.routing.sizes import NEVER, Sizes, overlaps, positions, shard_volumes
from sbp_core.boxing.routing.transfers import Transfers, transfers
from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Cluster
from sbp_core.placement import Placement

Floats = NDArray[np.float64]

#: Bits of the numbers that paths are compared by: bytes in the upper ones, seconds in the lower.
_BITS = 57

#: Of the seconds of a path, that the sum of the longest of a few steps stays below.
_SPARE_BITS = 4

#: Ranks whose messages are counted, at most; the fullest of them counts.
_NUM_RANKS = 8

#: Of a message that is so large that rounding it to bytes is nothing.
_LARGE_BYTES = 1 << 40

#: Numbers that are no powers of two are divided with a rest.
_ROUNDING = 1e-9


class LeastTimes:
    """The least bytes and seconds between all states of one mesh.

    Args:
        mesh: The placement.
        cluster: Rates and links; calibrations are not looked at.
        extents: Of the dims of the tensor; of a dim that every split divides evenly, any such.
        partials: Codes of the reductions that states may have.
    """

    def __init__(
        self, mesh: Placement, cluster: Cluster, extents: tuple[int, ...], partials: Sequence[int]
    ) -> None:
        self._mesh, self._cluster = mesh, cluster
        entries = ((*range(len(extents)), -1, *partials),) * mesh.num_axes
        self.layout = layout = Layout.of(mesh.mesh_shape, entries, len(extents))
        self._sizes = Sizes(extents, 0)
        same = tuple((rank, rank) for rank in range(mesh.size))
        kept = overlaps(layout, layout, self._sizes, positions(same))
        self._volumes = shard_volumes(layout, self._sizes)
        every = np.arange(len(layout))
        direct = transfers(layout, layout, self._sizes, same, kept)
        moved = direct.moved(every, every)
        steps = collectives(layout, self._sizes, kept)
        #: Elements of the tensor that both tables count.
        self.num_elements = prod(extents)
        self.elements, self.seconds = _shortest(
            moved,
            self._transfer_s(direct, moved),
            steps,
            self._collective_s(steps),
        )

    def _written_s(self) -> Floats:
        """Return what it takes to write each state, in seconds for elements of one byte."""
        written: Floats = self._volumes[0][self.layout.form] / (
            self._cluster.device.memory_bytes_per_s
        )
        return written

    def _collective_s(self, steps: Collectives) -> Floats:
        """Return the least seconds of each collective and local step, by its number."""
        before, after = steps.number.nonzero()
        number = steps.number[before, after]
        kinds, axes = steps.kind[number], steps.axes[number]
        form = self.layout.form
        most, mean = self._volumes.max(axis=0)[form], self._volumes.mean(axis=0)[form]
        shared = np.select(
            [kinds == KINDS.index(StepKind.ALL_GATHER), kinds == KINDS.index(StepKind.ALL_TO_ALL)],
            [most[after], mean[before] * (numbers(self._mesh.mesh_shape).max(axis=1)[axes] + 1)],
            most[before],
        )
        of = {
            (kind, mask): self._s_per_byte(KINDS[kind], mask)
            for kind, mask in {*zip(kinds.tolist(), axes.tolist(), strict=True)}
        }
        rates = np.array([of[one] for one in zip(kinds.tolist(), axes.tolist(), strict=True)])
        found = np.zeros(len(steps.kind))
        found[number] = rates * shared + self._written_s()[after]
        return found

    def _s_per_byte(self, kind: StepKind, mask: int) -> float:
        """Return the seconds of a collective for each byte that a group shares."""
        axes = [axis for axis in range(self._mesh.num_axes) if mask >> axis & 1]
        if kind is StepKind.LOCAL or num_ranks(self._mesh.mesh_shape, mask) < 2:
            return 0.0
        links = LinkRates.of(self._cluster)
        free = LinkRates(
            replace(links.intra, latency_s=0.0),
            replace(links.inter, latency_s=0.0),
            links.intra_shared,
            links.inter_shared,
            tuple(replace(level, link=replace(level.link, latency_s=0.0)) for level in links.outer),
        )
        groups = rank_groups(self._mesh.groups(*axes), self._cluster.group_sizes)
        # The slowest group counts; where they are unequal, that with the largest shard may be any.
        least_s = min(
            timed_algorithms(kind, group, _LARGE_BYTES, free)[0].time_s for group in {*groups}
        )
        return least_s / _LARGE_BYTES * (1 - _ROUNDING)

    def _transfer_s(self, direct: Transfers, moved: Ints) -> Floats:
        """Return the least seconds of each transfer between states."""
        layout, links = self.layout, LinkRates.of(self._cluster)
        beyond = self._cluster.node_level + 1
        near = max(path.bytes_per_s for path in links.paths)
        far = min(near, max((path.bytes_per_s for path in links.paths[beyond:]), default=near))
        possible = np.where(moved < NEVER, moved, 0)
        crossing = np.minimum(self._crossing(), possible)
        mean = ((possible - crossing) / near + crossing / far) / self._mesh.size
        for link, is_shared in links.levels[beyond : beyond + 1]:
            if is_shared:
                num_nodes = len({self._cluster.node(rank) for rank in self._mesh.rank_list})
                mean = np.maximum(mean, crossing / num_nodes / link.bytes_per_s)
        # Who adds up what, if the result is partial, is not known here.
        fullest = self._fullest_s(near, far)[direct.before][:, layout.form]
        fullest[:, layout.partial > 0] = 0.0
        return np.maximum(mean, fullest) + self._written_s()

    def _fullest_s(self, near: float, far: float) -> Floats:
        """Return what a rank takes to receive, by class of the state before and form after.

        What a rank wants comes from its own node, as far as any rank there has it.
        """
        layout, volumes = self.layout, self._volumes
        classes = _first_of_each(layout)
        shape = self._mesh.mesh_shape
        among = numbers(shape)
        terms = among.max(axis=1)[layout.partial[classes]] + 1
        tiles = among[layout.split[classes] | layout.partial[classes]]
        forms = layout.form[classes]
        nodes = (
            np.array(self._mesh.rank_list) // (self._cluster.group_sizes[self._cluster.node_level])
        )
        ranks = np.unique(np.linspace(0, len(nodes) - 1, _NUM_RANKS).astype(np.int64))
        found = np.zeros((len(classes), len(layout.forms)))
        for rank in ranks.tolist():
            comes = (volumes[rank] * terms[:, None]).astype(np.float64)
            beyond, own = comes.copy(), comes
            here = np.flatnonzero(nodes == nodes[rank])
            for peer in here.tolist():
                common = self._common(peer, rank)[forms]
                copies = (tiles[:, here] == tiles[:, [peer]]).sum(axis=1)
                beyond -= common / copies[:, None]
                if peer == rank:
                    own = comes - common
            np.maximum(beyond, 0.0, out=beyond)
            np.maximum(found, np.maximum(own - beyond, 0.0) / near + beyond / far, out=found)
        return found

    def _common(self, source: int, target: int) -> Floats:
        """Return what one rank has of what another one wants, by form before and after."""
        found = np.ones((1, 1))
        for dim, extent in enumerate(self._sizes.extents):
            start, stop = intervals(extent, self._mesh.mesh_shape)
            lengths = common_lengths(
                (start[:, [source]], stop[:, [source]]), (start[:, target], stop[:, target])
            )
            splits = self.layout.forms[:, dim]
            found = found * lengths[splits][:, splits]
        return found

    def _crossing(self) -> Ints:
        """Return the elements that cross nodes in a transfer, at least, by state.

        Nodes are as ranks of a mesh of their own, which hold all that any of theirs does.
        """
        layout, shape = self.layout, self._mesh.mesh_shape
        nothing = np.zeros((len(layout), len(layout)), dtype=np.int64)
        outer = _nodes_of(self._mesh, self._cluster.group_sizes[self._cluster.node_level])
        if outer is None:
            return nothing
        nodes = Layout.of(outer, layout.entries, layout.splits.shape[1])
        same = tuple((node, node) for node in range(prod(outer)))
        kept = overlaps(nodes, nodes, self._sizes, positions(same))
        every = np.arange(len(nodes))
        moved = transfers(nodes, nodes, self._sizes, same, kept).moved(every, every)
        # Uneven slices of a node need not be what its ranks have together.
        is_even = np.ones(len(layout), dtype=np.bool_)
        parts = numbers(shape).max(axis=1) + 1
        for dim, extent in enumerate(self._sizes.extents):
            is_even &= extent % parts[layout.splits[:, dim]] == 0
        is_known = is_even[:, None] & is_even & (moved < NEVER)
        return np.where(is_known, moved, nothing)


def _nodes_of(mesh: Placement, node_size: int) -> tuple[int, ...] | None:
    """Return the shape of the mesh of nodes, whose ranks are successive; None if it is no mesh.

    Of 4 x 4 x 2 ranks on nodes of 4: two of the second axis and both of the third are on one node,
    so the nodes are 4 x 2 x 1.
    """
    first = mesh.rank_list[0]
    if first % node_size or list(mesh.rank_list) != list(range(first, first + mesh.size)):
        return None
    outer: list[int] = []
    for extent in reversed(mesh.mesh_shape):
        inside = min(extent, node_size)
        if extent % inside or node_size % inside:
            return None
        outer.append(extent // inside)
        node_size //= inside
    return tuple(reversed(outer))


def _first_of_each(layout: Layout) -> Ints:
    """Return one state of each class of `Transfers.before`, in their order."""
    first: Ints
    _, first = np.unique(
        layout.form * (int(layout.partial.max()) + 1) + layout.partial, return_index=True
    )
    return first


def _shortest(
    moved: Ints, transfer_s: Floats, steps: Collectives, collective_s: Floats
) -> tuple[Ints, Floats]:
    """Return the fewest elements between all states, and the least seconds with so few."""
    before, after = steps.number.nonzero()
    number = steps.number[before, after]
    elements = steps.elements[number]
    possible = moved < NEVER
    # Counts are multiples of some shard, and so small numbers.
    unit = max(1, int(np.gcd(np.gcd.reduce(moved[possible]), np.gcd.reduce(elements))))
    most = max(int(moved[possible].max(initial=0)), int(elements.max(initial=0))) // unit
    bits = _BITS - most.bit_length()
    longest_s = max(transfer_s.max(initial=0.0), collective_s.max(initial=0.0))
    scale = (1 << (bits - _SPARE_BITS)) / longest_s
    # Rounded down, so that the sums are no more than what they stand for.
    both = np.full(moved.shape, NEVER, dtype=np.int64)
    both[possible] = ((moved // unit) << bits)[possible] + (transfer_s * scale).astype(np.int64)[
        possible
    ]
    alone = (elements // unit << bits) + (collective_s[number] * scale).astype(np.int64)
    both[before, after] = np.minimum(both[before, after], alone)
    np.fill_diagonal(both, 0)
    for between in range(len(both)):
        np.minimum(both, both[:, [between]] + both[between], out=both)
    return (both >> bits) * unit, (both & ((1 << bits) - 1)) / scale
