"""`BoxingStep`: a collective, transfer or local step that the router makes and backends execute.

A step takes a tensor from one (placement, nd-SBP) to the next; its kind names the collective. A
route is a list of steps. Nothing here moves data (`sbp_torch.boxing`, backends) or searches
(`boxing.router`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.units import format_bytes


class StepKind(StrEnum):
    """Which collective a step is, or that it is a transfer or local.

    The first four are collectives among the ranks of one mesh axis, or of several merged ones, of
    one placement.
    `TRANSFER` sends slice intersections point to point, from the ranks of one placement to the
    ranks of another. `LOCAL` moves nothing: each rank slices, zero-fills or keeps its shard.
    """

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    TRANSFER = "transfer"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxingStep:
    """One step of a route: a collective, a transfer, or a local step.

    Args:
        kind: Kind of the step.
        shape, dtype: Of the logical tensor.
        source, target: (placement, nd-SBP) before and after. Only `TRANSFER` changes the
            placement; a collective changes the nd-SBP on `axes` only.
        axes: The mesh axes of a collective, ascending, whose ranks are merged in row-major order;
            the one mesh axis of a local step; empty for `TRANSFER`.
        size_bytes: Bytes moved between ranks, summed over all ranks.
    """

    kind: StepKind
    shape: tuple[int, ...]
    dtype: str
    source: tuple[Placement, NdSbp]
    target: tuple[Placement, NdSbp]
    axes: tuple[int, ...]
    size_bytes: int

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that take part together with `rank`, in mesh order."""
        if self.kind is StepKind.LOCAL:
            return (rank,)
        if self.kind is StepKind.TRANSFER:
            senders, receivers = self.source[0].rank_list, self.target[0].rank_list
            return tuple(dict.fromkeys((*senders, *receivers)))
        return self.source[0].group(rank, *self.axes)

    @property
    def axis_names(self) -> str:
        """The mesh axes in words, such as "axis 'data'" or "axes 'data', 'tensor'"."""
        names = ", ".join(repr(self.source[0].axes[axis]) for axis in self.axes)
        return f"axis {names}" if len(self.axes) == 1 else f"axes {names}"

    def __str__(self) -> str:
        """One line: kind, mesh axes, from -> to, bytes."""
        (before, source), (after, target) = self.source, self.target
        change = f"({source}) -> ({target}), {format_bytes(self.size_bytes)}"
        if self.kind is not StepKind.TRANSFER:
            return f"{self.kind.value} on {self.axis_names}: {change}"
        if before == after:
            return f"{self.kind.value} within {before.ranks}: {change}"
        return f"{self.kind.value} from {before.ranks} to {after.ranks}: {change}"
