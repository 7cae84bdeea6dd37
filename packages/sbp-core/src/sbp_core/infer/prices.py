"""Price conversions, from one layout of a tensor to another, while shardings are searched.

The router (`sbp_core.boxing`) is asked once for each.

A search that decides one mesh axis at a time prices a conversion as a route on a mesh of one axis:
a group of ranks along that axis. A search that decides all axes at once prices the whole route. The
finished plan is priced again, with whole routes.

Conversions that differ in names alone have one price, and one key:

    dims may change places                 float32[8, 64] S(0) -> S(1)  on 4 ranks
    dims that all ranks divide evenly          = float32[64, 8] S(1) -> S(0)
    count by the size of the tensor            = float32[16, 32] S(0) -> S(1)
    alone                                          dims: {0, 1} split by axis 0 at source, target
    so may stages                          stage 1 -> stage 2  =  stage 2 -> stage 3

and where all dims are even, tensors of all sizes take the same steps. So a route is searched once,
and for another size only its steps are priced again.

A tensor that could share a bucket with others is priced by its share of the bucket, see
`sbp_core.compile.bucket_price`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, lcm, prod

from sbp_core.boxing.routes import Route
from sbp_core.cluster import Cluster
from sbp_core.compile.bucket_price import BucketPrices, Companions
from sbp_core.cost import fastest_route
from sbp_core.errors import SbpError
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp, Split

#: (seconds, bytes moved between all ranks)
Price = tuple[float, int]

#: The SBP of a tensor on the axes.
Entries = tuple[Sbp, ...]

#: The part of a conversion that decides its price; without sizes, where these do not matter.
_Key = tuple[object, ...]

#: Of a tensor: its elements, the bytes of one element, and its companions.
_Sizes = tuple[int, int, Companions | None]


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """One end of conversions: a stage and an SBP.

    Args:
        stage: The stage.
        entries: The SBP on the axes.
        splits: For each dim that some axis splits, the mask of the axes that split it.
        rest: Number of the entries with their splits removed.
    """

    stage: int
    entries: Entries
    splits: tuple[tuple[int, int], ...]
    rest: int


class Prices:
    """Conversion prices on some mesh axes of the stages.

    Args:
        stages: Placement of each stage.
        axes: The mesh axes.
        cluster: Rates and links.
        bucket_bytes: Most bytes of a bucket, as in the compiler's options; 0 for no buckets.
    """

    def __init__(
        self,
        stages: Sequence[Placement],
        axes: range,
        cluster: Cluster,
        bucket_bytes: int | None = None,
    ) -> None:
        self._groups = [_group(stage, axes) for stage in stages]
        self._num_groups = [
            stage.size // prod(stage.mesh_shape[axis] for axis in axes) for stage in stages
        ]
        self._cluster = cluster
        self._buckets = BucketPrices(cluster, bucket_bytes)
        #: The number that has to divide a dim for it to be even on all placements of a route.
        self._parts = lcm(*(group.size for group in self._groups))
        self._found: dict[_Key, Price] = {}
        self._tables: dict[_Key, list[list[Price]]] = {}
        self._ends: dict[tuple[int, Entries], _End] = {}
        self._rests: dict[tuple[Sbp | None, ...], int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._layouts: dict[tuple[object, ...], int] = {}
        # For even tensors: the steps of a conversion, by its key without sizes; and the seconds and
        # bytes of a step, by its own key and the sizes.
        self._steps: dict[_Key, tuple[_Key, ...]] = {}
        self._step_prices: dict[_Key, Price] = {}

    def price(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, Entries],
        target: tuple[int, Entries],
        companions: Companions | None = None,
    ) -> Price:
        """Return the price from one (stage, SBP on these axes) to another.

        Args:
            shape: Shape that one group of ranks along the axes holds together.
            dtype: Its dtype name.
            source: Present (stage, SBP on these axes).
            target: Wanted (stage, SBP on these axes).
            companions: The tensors that could travel with it; None for none.

        Returns:
            Seconds and bytes; infinite seconds if no route exists.
        """
        return self.table(shape, dtype, (source,), (target,), companions)[0][0]

    def table(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sources: Sequence[tuple[int, Entries]],
        targets: Sequence[tuple[int, Entries]],
        companions: Companions | None = None,
    ) -> list[list[Price]]:
        """Return the price from each source (rows) to each target (columns); see `price`.

        Args:
            shape: Shape that one group of ranks along the axes holds together.
            dtype: Its dtype name.
            sources: (stage, SBP on these axes) of each source.
            targets: (stage, SBP on these axes) of each target.
            companions: The tensors that could travel with it; None for none.

        Returns:
            Not to be changed: equal layers and equal stages share it.
        """
        first, second = {stage for stage, _ in sources}, {stage for stage, _ in targets}
        if len(first) != 1 or len(second) != 1:
            return self._priced_table(shape, dtype, sources, targets, companions)
        key = (
            *(shape, dtype, companions, self._pair(*first, *second)),
            *(tuple(entries for _, entries in ends) for ends in (sources, targets)),
        )
        if key not in self._tables:
            self._tables[key] = self._priced_table(shape, dtype, sources, targets, companions)
        return self._tables[key]

    def _priced_table(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sources: Sequence[tuple[int, Entries]],
        targets: Sequence[tuple[int, Entries]],
        companions: Companions | None,
    ) -> list[list[Price]]:
        # The extent of an evenly divided dim does not matter.
        extents = [0 if extent and extent % self._parts == 0 else 1 + extent for extent in shape]
        is_even = bool(shape) and not any(extents)
        sizes = (prod(shape), ITEMSIZE[dtype], companions)
        ends = [self._end(target) for target in targets]
        found: list[list[Price]] = []
        for start in map(self._end, sources):
            row: list[Price] = []
            found.append(row)
            for end in ends:
                if start is end:
                    row.append((0.0, 0))
                    continue
                alike = self._alike(extents, start, end)
                key = (*sizes, *alike)
                if key not in self._found:
                    # Which route to another placement is faster depends on the size.
                    stays = self._groups[start.stage] == self._groups[end.stage]
                    self._found[key] = self._priced(
                        shape, dtype, (start, end), sizes, alike if is_even and stays else None
                    )
                row.append(self._found[key])
        return found

    def _end(self, end: tuple[int, Entries]) -> _End:
        found = self._ends.get(end)
        if found is None:
            stage, entries = end
            masks: dict[int, int] = {}
            for axis, entry in enumerate(entries):
                if isinstance(entry, Split):
                    masks[entry.dim] = masks.get(entry.dim, 0) | 1 << axis
            rest = tuple(None if isinstance(entry, Split) else entry for entry in entries)
            number = self._rests.setdefault(rest, len(self._rests))
            found = self._ends[end] = _End(stage, entries, tuple(masks.items()), number)
        return found

    def _pair(self, source: int, target: int) -> int:
        """Return a number for two stages, equal for pairs of stages with equal prices.

        Prices depend only on what the ranks share: the ranks themselves, nodes, and groups of
        nodes, numbered in the order in which they appear.
        """
        found = self._pairs.get((source, target))
        if found is None:
            groups = (self._groups[source], self._groups[target])
            ranks = [rank for group in groups for rank in group.rank_list]
            layout: list[object] = [(group.mesh_shape, group.axes) for group in groups]
            layout += [self._num_groups[source], self._num_groups[target]]
            for size in (1, *self._cluster.group_sizes):
                number: dict[int, int] = {}
                layout.append(tuple(number.setdefault(rank // size, len(number)) for rank in ranks))
            found = self._layouts.setdefault(tuple(layout), len(self._layouts))
            self._pairs[source, target] = found
        return found

    def _alike(self, extents: Sequence[int], source: _End, target: _End) -> _Key:
        """Return a key that is equal for conversions of one price, for tensors of one size."""
        masks = [0] * len(extents)
        for dim, mask in source.splits:
            masks[dim] = mask
        for dim, mask in target.splits:
            masks[dim] |= mask << len(target.entries)
        dims = sorted(zip(masks, extents, strict=True))
        return (self._pair(source.stage, target.stage), source.rest, target.rest, *dims)

    def _priced(
        self,
        shape: tuple[int, ...],
        dtype: str,
        ends: tuple[_End, _End],
        sizes: _Sizes,
        alike: _Key | None,
    ) -> Price:
        """Price a conversion; for an even tensor, by its known steps if there are any."""
        steps = self._steps.get(alike) if alike is not None else None
        if steps is not None:
            prices = [self._step_prices.get((*sizes, *step)) for step in steps]
            known = [price for price in prices if price is not None]
            if len(known) == len(prices):
                return sum(price[0] for price in known), sum(price[1] for price in known)
        source, target = ends
        try:
            found = fastest_route(
                shape,
                dtype,
                (self._groups[source.stage], NdSbp(*source.entries)),
                (self._groups[target.stage], NdSbp(*target.entries)),
                self._cluster,
            )
        except SbpError:
            return inf, 0
        times = self._num_groups[source.stage]
        if alike is None:
            seconds = sum(self._buckets.step_time_s(step, sizes[2]) for step in found.steps)
            return seconds, found.bytes * times
        return self._noted(found, ends, sizes, alike, times)

    def _noted(
        self, found: Route, ends: tuple[_End, _End], sizes: _Sizes, alike: _Key, times: int
    ) -> Price:
        """Price the steps of a route, and keep them for tensors of other sizes."""
        extents = [0] * len(found.shape)
        stages = (ends[0].stage, ends[1].stage)
        keys: list[_Key] = []
        seconds, size_bytes = 0.0, 0
        for step in found.steps:
            start, end = (self._end_of(state, stages) for state in (step.source, step.target))
            key = (step.kind, step.axes, *self._alike(extents, start, end))
            keys.append(key)
            one = self._step_prices.get((*sizes, *key))
            if one is None:
                one = self._buckets.step_time_s(step, sizes[2]), step.size_bytes * times
                self._step_prices[(*sizes, *key)] = one
            seconds, size_bytes = seconds + one[0], size_bytes + one[1]
        self._steps[alike] = tuple(keys)
        return seconds, size_bytes

    def _end_of(self, state: tuple[Placement, NdSbp], stages: tuple[int, int]) -> _End:
        """Return the end that stands for a state between steps, on one of two stages."""
        placement, sbp = state
        stage = stages[0] if placement == self._groups[stages[0]] else stages[1]
        return self._end((stage, tuple(sbp)))


def _group(stage: Placement, axes: range) -> Placement:
    """Return the first group of ranks along some mesh axes, as a mesh of these axes."""
    for axis in reversed(range(stage.num_axes)):
        if axis not in axes:
            stage = stage.submesh(axis, 0)
    return stage
