"""Bound the time to convert a tensor from below, in seconds per byte, for all layouts on a mesh.

`infer.least_prices` uses the bounds, so that planners need not find a route for each. A state is a
layout (nd-SBP), a route the steps between two. Routes have the fewest bytes (`boxing.router`). So
between two states, no route is faster than the fastest of all routes with the fewest bytes,
computed without latencies:

    local step    writing its result
    collective    the fastest algorithm on links without latency, and writing its result
    transfer      the bytes that the fullest rank receives, from its own node where possible, and
                  on average the bytes that have to cross nodes; and writing its result

All of this is proportional to the size of the tensor, so it is computed once for all tensors whose
dims are split alike: shortest paths between all states, by bytes, then by seconds. A tensor that is
boxed alone also takes launches and latencies, which are constant, so its paths are computed once
for each size (`LeastTimes.alone_s`). Which of several copies is sent is not modelled.

Source: Floyd, "Algorithm 97: shortest path", Communications of the ACM 5 (1962).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from sbp_core.boxing.algorithms import LinkRates, timed_algorithms
from sbp_core.boxing.price import rank_groups
from sbp_core.boxing.routing.collectives import KINDS, collectives
from sbp_core.boxing.routing.layout import (
    NEVER,
    Ints,
    Layout,
    Sizes,
    common_lengths,
    intervals,
    num_ranks,
    numbers,
    overlaps,
    positions,
    shard_volumes,
)
from sbp_core.boxing.routing.transfers import Transfers, transfers
from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Cluster
from sbp_core.placement import Placement

Floats = NDArray[np.float64]

#: Bits of the numbers that paths are compared by: bytes in the upper ones, seconds in the lower.
_BITS = 57

#: Bits of the seconds of a path that are left free, for sums of the longest of a few steps.
_SPARE_BITS = 4

#: Most ranks whose messages are counted; the fullest of them counts.
_NUM_RANKS = 8

#: Bytes of a message that is so large that rounding to bytes is negligible.
_LARGE_BYTES = 1 << 40

_LOCAL = KINDS.index(StepKind.LOCAL)

#: Division by numbers that are not powers of two is rounded by at most this share.
_ROUNDING = 1e-9


class LeastTimes:
    """The least bytes and seconds between all states of one mesh.

    Args:
        mesh: The placement.
        cluster: Rates and links; calibrations are ignored.
        extents: Extents of the tensor's dims; for a dim that every split divides evenly, any such.
        partials: Codes of the reductions that states may have.
    """

    def __init__(
        self, mesh: Placement, cluster: Cluster, extents: tuple[int, ...], partials: Sequence[int]
    ) -> None:
        self._mesh, self._cluster = mesh, cluster
        self._links = LinkRates.of(cluster)
        self._node_size = cluster.group_sizes[cluster.node_level]
        entries = ((*range(len(extents)), -1, *partials),) * mesh.num_axes
        self.layout = layout = Layout.of(mesh.mesh_shape, entries, len(extents))
        self._sizes = Sizes(extents, 0)
        same = tuple((rank, rank) for rank in range(mesh.size))
        kept = overlaps(layout, layout, self._sizes, positions(same))
        self._volumes = shard_volumes(layout, self._sizes)
        every = np.arange(len(layout))
        direct = transfers(layout, layout, self._sizes, same, kept)
        self._moved = direct.moved(every, every)
        steps = collectives(layout, self._sizes, kept)
        # For each collective and local step: the state before, the state after, the elements that
        # it moves, and the elements that a group of it shares.
        before, after = steps.number.nonzero()
        number = steps.number[before, after]
        self._before, self._after, self._elements = before, after, steps.elements[number]
        self._kinds, self._axes = steps.kind[number], steps.axes[number]
        self._shared = self._shared_elements()
        #: The time to write each state, in seconds for elements of one byte.
        self._written_s: Floats = self._volumes[0][layout.form] / cluster.device.memory_bytes_per_s
        #: Elements of the tensor that both tables count.
        self.num_elements = prod(extents)
        self._port_s, self._link_s = self._transfer_s(direct)
        transfer_s = np.maximum(self._port_s, self._link_s)
        rates = self._of_each([self._kinds, self._axes], self._s_per_byte)
        collective_s = rates * self._shared + self._written_s[after]
        self.elements, self.seconds = self._shortest(transfer_s, collective_s)
        self._by_size: dict[int, Floats] = {}
        #: The time from each state until nothing is partial, whatever bytes that moves.
        self.reduced_s = self._reduced_s(transfer_s, collective_s)

    def alone_s(self, num_bytes: int) -> Floats:
        """Return the least seconds of tensors of a size that are boxed alone.

        Each step has its launches, and the latencies of its algorithm.

        Args:
            num_bytes: Bytes of the whole tensor.
        """
        if num_bytes in self._by_size:
            return self._by_size[num_bytes]
        scale, device = num_bytes / self.num_elements, self._cluster.device

        def step_s(kind: int, mask: int, size: int) -> float:
            launch_s = 0.0 if kind == _LOCAL else device.boxing_launch_s
            return self._least_time_s(kind, mask, size, self._links) + (device.launch_s + launch_s)

        # A rank's messages follow each other; on a shared link their latencies overlap.
        port_s = scale * self._port_s + self._messages_s()
        launch_s = device.launch_s + device.boxing_launch_s
        transfer_s = np.maximum(port_s, scale * self._link_s) + launch_s
        sizes = (scale * self._shared).astype(np.int64)
        collective_s = self._of_each([self._kinds, self._axes, sizes], step_s)
        collective_s = collective_s + scale * self._written_s[self._after]
        self._by_size[num_bytes] = self._shortest(transfer_s, collective_s)[1]
        return self._by_size[num_bytes]

    def _of_each(self, keys: list[Ints], time_s: Callable[..., float]) -> Floats:
        """Return the time of each collective and local step, computed once for equal keys."""
        different, place = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
        times = np.array([time_s(*one) for one in different.tolist()], dtype=np.float64)
        return times[place.ravel()]

    def _shortest(self, transfer_s: Floats, collective_s: Floats) -> tuple[Ints, Floats]:
        """Return the fewest elements between all states, and the least seconds with so few."""
        moved, elements = self._moved, self._elements
        possible = moved < NEVER
        # Counts are multiples of some shard, so they are small numbers in that unit.
        unit = max(1, int(np.gcd(np.gcd.reduce(moved[possible]), np.gcd.reduce(elements))))
        most = max(int(moved[possible].max(initial=0)), int(elements.max(initial=0))) // unit
        bits = _BITS - most.bit_length()
        longest_s = max(transfer_s.max(initial=0.0), collective_s.max(initial=0.0))
        scale = (1 << (bits - _SPARE_BITS)) / longest_s
        # Rounded down, so that the sums never exceed the exact values.
        both = np.full(moved.shape, NEVER, dtype=np.int64)
        both[possible] = ((moved // unit) << bits)[possible]
        both[possible] += (transfer_s * scale).astype(np.int64)[possible]
        alone = (elements // unit << bits) + (collective_s * scale).astype(np.int64)
        ends = self._before, self._after
        both[ends] = np.minimum(both[ends], alone)
        np.fill_diagonal(both, 0)
        by_way = np.empty_like(both)
        for between in range(len(both)):
            np.add(both[:, between, None], both[between], out=by_way)
            np.minimum(both, by_way, out=both)
        return (both >> bits) * unit, (both & ((1 << bits) - 1)) / scale

    def _messages_s(self) -> Floats:
        """Return the latencies of the messages that a rank receives from other nodes, by state.

        A rank receives one for each tile that it needs a part of, except tiles its node may have.
        """
        layout, shape = self.layout, self._mesh.mesh_shape
        beyond = self._links.paths[self._cluster.node_level + 1 :]
        latency_s = min((path.latency_s for path in beyond), default=0.0)
        tiles = (numbers(shape).max(axis=1) + 1)[layout.partial][:, None].astype(np.float64)
        for dim, extent in enumerate(self._sizes.extents):
            splits = layout.splits[:, dim]
            tiles = tiles * _num_slices(extent, shape)[splits][:, splits]
        found: Floats = np.maximum(tiles - self._node_size, 0.0) * latency_s
        found[:, layout.partial > 0] = 0.0
        return found

    def _shared_elements(self) -> Floats:
        """Return the elements that a group of each step shares: the most, or the mean."""
        kinds, form, before = self._kinds, self.layout.form, self._before
        most, mean = self._volumes.max(axis=0)[form], self._volumes.mean(axis=0)[form]
        ranks = numbers(self._mesh.mesh_shape).max(axis=1)[self._axes] + 1
        shared: Floats = np.select(
            [kinds == KINDS.index(StepKind.ALL_GATHER), kinds == KINDS.index(StepKind.ALL_TO_ALL)],
            [most[self._after].astype(np.float64), mean[before] * ranks],
            most[before].astype(np.float64),
        )
        return shared

    def _reduced_s(self, transfer_s: Floats, collective_s: Floats) -> Floats:
        """Return the least time from each state to any state without partial values.

        Local steps are assumed to be free. So the bound also holds if other axes have partial
        values of another kind on the way: with `B` in their place, any work on these axes is at
        most a local step.
        """
        length = np.where(self._moved < NEVER, transfer_s, np.inf)
        ends = self._before, self._after
        length[ends] = np.minimum(length[ends], np.where(self._kinds == _LOCAL, 0, collective_s))
        least = np.where(self.layout.partial == 0, 0.0, np.inf)
        while True:
            shorter = np.minimum(least, (length + least).min(axis=1))
            if (shorter == least).all():
                return least
            least = shorter

    def _s_per_byte(self, kind: int, mask: int) -> float:
        """Return the seconds of a collective for each byte that a group shares."""
        levels = self._links.levels
        free = LinkRates(tuple((replace(link, latency_s=0.0), shared) for link, shared in levels))
        return self._least_time_s(kind, mask, _LARGE_BYTES, free) / _LARGE_BYTES * (1 - _ROUNDING)

    def _least_time_s(self, kind: int, mask: int, num_bytes: int, links: LinkRates) -> float:
        """Return the least time of a collective whose groups share this many bytes each."""
        if kind == _LOCAL or num_ranks(self._mesh.mesh_shape, mask) < 2:
            return 0.0
        axes = [axis for axis in range(self._mesh.num_axes) if mask >> axis & 1]
        groups = {*rank_groups(self._mesh.groups(*axes), self._cluster.group_sizes)}
        # The slowest group counts. If groups are unequal, any of them may have the largest shard,
        # so the fastest one is taken.
        return min(timed_algorithms(KINDS[kind], one, num_bytes, links)[0].time_s for one in groups)

    def _transfer_s(self, direct: Transfers) -> tuple[Floats, Floats]:
        """Return the least seconds of each transfer, by its fullest rank and by shared links."""
        layout, links, moved = self.layout, self._links, self._moved
        beyond = self._cluster.node_level + 1
        near = max(path.bytes_per_s for path in links.paths)
        far = min(near, max((path.bytes_per_s for path in links.paths[beyond:]), default=near))
        possible = np.where(moved < NEVER, moved, 0)
        crossing = np.minimum(self._crossing(), possible)
        mean = ((possible - crossing) / near + crossing / far) / self._mesh.size
        link_s = np.zeros(moved.shape)
        for link, is_shared in links.levels[beyond : beyond + 1]:
            if is_shared:
                num_nodes = len({self._cluster.node(rank) for rank in self._mesh.rank_list})
                link_s = crossing / num_nodes / link.bytes_per_s
        # If the result is partial, it is not known here which rank adds up what.
        fullest = self._fullest_s(near, far)[direct.before][:, layout.form]
        fullest[:, layout.partial > 0] = 0.0
        return np.maximum(mean, fullest) + self._written_s, link_s + self._written_s

    def _fullest_s(self, near: float, far: float) -> Floats:
        """Return the time of a rank to receive, by class of the state before and form after.

        A slice comes from the rank's own node, if any rank there has it.
        """
        layout, volumes = self.layout, self._volumes
        # One state of each class of `Transfers.before`, in their order.
        keys = layout.form * (int(layout.partial.max()) + 1) + layout.partial
        classes = np.unique(keys, return_index=True)[1]
        shape = self._mesh.mesh_shape
        among = numbers(shape)
        terms = among.max(axis=1)[layout.partial[classes]] + 1
        tiles = among[layout.split[classes] | layout.partial[classes]]
        forms = layout.form[classes]
        nodes = np.array(self._mesh.rank_list) // self._node_size
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
        """Return the elements of one rank that another one needs, by form before and after."""
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
        """Return the least elements that cross nodes in a transfer, by state.

        Nodes are treated as ranks of a mesh, which hold everything that any of their ranks holds.
        """
        layout, shape = self.layout, self._mesh.mesh_shape
        nothing = np.zeros((len(layout), len(layout)), dtype=np.int64)
        outer = _nodes_of(self._mesh, self._node_size)
        if outer is None:
            return nothing
        nodes = Layout.of(outer, layout.entries, layout.splits.shape[1])
        same = tuple((node, node) for node in range(prod(outer)))
        kept = overlaps(nodes, nodes, self._sizes, positions(same))
        every = np.arange(len(nodes))
        moved = transfers(nodes, nodes, self._sizes, same, kept).moved(every, every)
        # An uneven slice of a node need not be the union of its ranks' slices.
        is_even = np.ones(len(layout), dtype=np.bool_)
        parts = numbers(shape).max(axis=1) + 1
        for dim, extent in enumerate(self._sizes.extents):
            is_even &= extent % parts[layout.splits[:, dim]] == 0
        is_known = is_even[:, None] & is_even & (moved < NEVER)
        return np.where(is_known, moved, nothing)


@lru_cache(maxsize=256)
def _num_slices(extent: int, mesh_shape: tuple[int, ...]) -> Ints:
    """Return the least number of slices of a dim before that a rank needs parts of after.

    Returns:
        By mask of the axes that split the dim before, and after.
    """
    start, stop = intervals(extent, mesh_shape)
    found = np.zeros((len(start), len(start)), dtype=np.int64)
    for held, (first, last) in enumerate(zip(start, stop, strict=True)):
        slices = np.array(sorted({*zip(first.tolist(), last.tolist(), strict=True)}))
        one = slices[:, 0, None, None], slices[:, 1, None, None]
        common = common_lengths(one, (start[None], stop[None]))
        found[held] = (common > 0).sum(axis=0).min(axis=1)
    return found


def _nodes_of(mesh: Placement, node_size: int) -> tuple[int, ...] | None:
    """Return the shape of the mesh of nodes, with successive ranks; None if it is no mesh.

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
