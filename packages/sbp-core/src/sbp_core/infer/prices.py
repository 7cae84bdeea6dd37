"""Prices of conversions on one mesh axis, each asked of the router once.

The search decides one mesh axis at a time, so it prices a conversion as the route on the mesh of
one axis that a group of ranks along that axis is. The whole plan is priced again, with whole
routes, when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sbp_core.boxing.router import route
from sbp_core.cluster import Cluster
from sbp_core.cost import boxing_time_s
from sbp_core.errors import SbpError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp

#: (seconds, bytes moved between all ranks)
Price = tuple[float, int]


class AxisPrices:
    """Conversion prices on one mesh axis of the stages.

    Args:
        stages: Placement of each stage.
        axis: The mesh axis.
        cluster: Links.
    """

    def __init__(self, stages: Sequence[Placement], axis: int, cluster: Cluster) -> None:
        self._groups = [
            Placement(
                list(stage.group(stage.rank_list[0], axis)), (stage.axes[axis],), stage.device
            )
            for stage in stages
        ]
        self._num_groups = [stage.size // stage.mesh_shape[axis] for stage in stages]
        self._cluster = cluster
        self._found: dict[tuple[tuple[int, ...], str, int, Sbp, int, Sbp], Price] = {}

    def price(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, Sbp],
        target: tuple[int, Sbp],
    ) -> Price:
        """Return the price from one (stage, SBP on this axis) to another.

        Args:
            shape: Of what one group of ranks along the axis holds together.
            dtype: Its dtype name.
            source: (stage, SBP on this axis) that it comes from.
            target: (stage, SBP on this axis) that it is to have.

        Returns:
            Seconds and bytes; infinite seconds if no route exists.
        """
        if source == target:
            return 0.0, 0
        key = (shape, dtype, *source, *target)
        if key not in self._found:
            self._found[key] = self._ask(shape, dtype, source, target)
        return self._found[key]

    def _ask(
        self,
        shape: tuple[int, ...],
        dtype: str,
        source: tuple[int, Sbp],
        target: tuple[int, Sbp],
    ) -> Price:
        try:
            found = route(
                shape,
                dtype,
                (self._groups[source[0]], NdSbp(source[1])),
                (self._groups[target[0]], NdSbp(target[1])),
            )
        except SbpError:
            return inf, 0
        return boxing_time_s(found, self._cluster), found.bytes * self._num_groups[source[0]]
