"""Prices of conversions on some mesh axes, each asked of the router once.

A search that decides one mesh axis at a time prices a conversion as the route on the mesh of one
axis that a group of ranks along that axis is, one that decides all axes at once as the whole route.
The whole plan is priced again, with whole routes, when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from sbp_core.boxing.router import route
from sbp_core.cluster import Cluster
from sbp_core.cost import boxing_time_s
from sbp_core.errors import SbpError
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp, Split

#: (seconds, bytes moved between all ranks)
Price = tuple[float, int]


class Prices:
    """Conversion prices on some mesh axes of the stages.

    Args:
        stages: Placement of each stage.
        axes: The mesh axes.
        cluster: Links.
    """

    def __init__(self, stages: Sequence[Placement], axes: range, cluster: Cluster) -> None:
        self._groups = [_group(stage, axes) for stage in stages]
        self._num_groups = [
            stage.size // prod(stage.mesh_shape[axis] for axis in axes) for stage in stages
        ]
        self._cluster = cluster
        self._found: dict[tuple[object, ...], Price] = {}

    def price(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, tuple[Sbp, ...]],
        target: tuple[int, tuple[Sbp, ...]],
    ) -> Price:
        """Return the price from one (stage, SBP on these axes) to another.

        Args:
            shape: Of what one group of ranks along the axes holds together.
            dtype: Its dtype name.
            source: (stage, SBP on these axes) that it comes from.
            target: (stage, SBP on these axes) that it is to have.

        Returns:
            Seconds and bytes; infinite seconds if no route exists.
        """
        if source == target:
            return 0.0, 0
        key = self._alike(shape, dtype, source, target)
        if key not in self._found:
            self._found[key] = self._ask(shape, dtype, source, target)
        return self._found[key]

    def _alike(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, tuple[Sbp, ...]],
        target: tuple[int, tuple[Sbp, ...]],
    ) -> tuple[object, ...]:
        """Return a key that is equal for conversions of one price.

        Dims may change places, and of one that all ranks divide evenly the extent does not matter
        beside the size of the tensor:

            float32[8, 64] S(0) -> S(1)  on 4 ranks  =  float32[64, 8] S(1) -> S(0)
                                                     =  float32[16, 32] S(0) -> S(1)
        """
        ends = (*source[1], *target[1])
        ranks = max(self._groups[source[0]].size, self._groups[target[0]].size)
        at: dict[int, list[int]] = {}
        for place, entry in enumerate(ends):
            if isinstance(entry, Split):
                at.setdefault(entry.dim, []).append(place)
        dims = sorted(
            (tuple(at.get(dim, ())), 0 if extent % ranks == 0 else extent)
            for dim, extent in enumerate(shape)
        )
        rest = tuple(None if isinstance(entry, Split) else entry for entry in ends)
        return (source[0], target[0], prod(shape), ITEMSIZE[dtype], *dims, rest)

    def _ask(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, tuple[Sbp, ...]],
        target: tuple[int, tuple[Sbp, ...]],
    ) -> Price:
        try:
            found = route(
                shape,
                dtype,
                (self._groups[source[0]], NdSbp(*source[1])),
                (self._groups[target[0]], NdSbp(*target[1])),
            )
        except SbpError:
            return inf, 0
        return boxing_time_s(found, self._cluster), found.bytes * self._num_groups[source[0]]


def _group(stage: Placement, axes: range) -> Placement:
    """Return the first group of ranks along some mesh axes, as a mesh of these axes."""
    for axis in reversed(range(stage.num_axes)):
        if axis not in axes:
            stage = stage.submesh(axis, 0)
    return stage
