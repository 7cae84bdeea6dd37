"""Steps and routes of boxing: the values that the router makes and every backend executes.

A step takes a tensor from one (placement, nd-SBP) to the next; its kind says which collective does
it. A route is a list of steps. Nothing here moves data (`boxing.execute`, backends) or searches
(`boxing.router`). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp


class StepKind(str, Enum):
    """The primitive that a step is.

    The first four are collectives among the ranks of one mesh axis of one placement.
    `TRANSFER` sends slice intersections from the ranks of one placement to those of another, point
    to point. `LOCAL` moves nothing: each rank slices, zero-fills or keeps what it has.
    """

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    TRANSFER = "transfer"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One primitive.

    Args:
        kind: Which.
        shape, dtype: Of the logical tensor.
        source, target: (placement, nd-SBP) before and after. Only `TRANSFER` changes the
            placement; a collective changes the nd-SBP on `axis` only.
        axis: The mesh axis of a collective or local step; -1 for `TRANSFER`.
        size_bytes: Bytes moved between ranks, summed over all ranks.
    """

    kind: StepKind
    shape: tuple[int, ...]
    dtype: str
    source: tuple[Placement, NdSbp]
    target: tuple[Placement, NdSbp]
    axis: int
    size_bytes: int

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that take part together with `rank`, in mesh order."""
        if self.kind is StepKind.LOCAL:
            return (rank,)
        if self.kind is StepKind.TRANSFER:
            senders, receivers = self.source[0].rank_list, self.target[0].rank_list
            return tuple(dict.fromkeys((*senders, *receivers)))
        return self.source[0].group(rank, self.axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a logical tensor gets from one (placement, nd-SBP) to another."""

    shape: tuple[int, ...]
    dtype: str
    source: tuple[Placement, NdSbp]
    target: tuple[Placement, NdSbp]
    steps: tuple[Step, ...]

    @property
    def bytes(self) -> int:
        """Bytes moved between ranks, summed over ranks and steps."""
        return sum(step.size_bytes for step in self.steps)
