"""A collective of the threads of one process: what each does of it, all at the same time.

Large tensors are worth the cores of all ranks: each rank makes its part of what all share (a sum, a
gathered tensor), or its own result. Small ones are done by whoever came last: to wake the others
twice takes longer. Either way sums are made in mesh order, so that bits do not depend on who does
what. Knows torch; waits for nobody (that is `local`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from sbp_core.boxing.arena import Arena
from sbp_core.boxing.execute import apply_step, check_shard, reduce_in_order, reduction_of
from sbp_core.boxing.slices import Piece, bounds_of, collective_pieces
from sbp_core.boxing.step import Step, StepKind
from sbp_core.sbp import split_bounds

#: Bytes of all shards from which on every rank does its share. Waking threads takes some 0.1 ms, in
#: which one core copies about as much.
_SHARED_BYTES = 1024 * 1024

#: Bytes of a shard that are reduced at a time, if there are more than two: what the first of them
#: come to is still in the cache when the next is added. Smaller blocks spend more on their calls,
#: for which threads take turns. (Linux, two cores of an AMD EPYC: 64 MB on four ranks take 17.5 ms
#: in blocks of 1 MB, 26.6 ms of 128 KB, 20.8 ms at once.)
_BLOCK_BYTES = 1024 * 1024


class Shares(ABC):
    """The shares of the ranks of one group in one collective.

    `results` holds each rank's part under the step's target, once all shares are done; `are_done`
    says that they were done at once.
    """

    are_done = False

    def __init__(self) -> None:
        self.results: dict[int, torch.Tensor] = {}

    @abstractmethod
    def do(self, rank: int) -> None:
        """Do one rank's share; called once for each rank, on several threads at once."""


def share_out(
    step: Step,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    donated: Sequence[int],
    arena: Arena,
) -> Shares:
    """Divide a collective among the ranks of a group.

    Args:
        step: Of any kind but `TRANSFER` and `LOCAL`.
        group: In mesh order.
        shards: Of all its ranks.
        donated: The ranks whose shard may be overwritten, and may become the result.
        arena: Where results are made.

    Raises:
        BoxingError: a shard has another shape or dtype than the step gives.
    """
    if sum(shard.nbytes for shard in shards.values()) < _SHARED_BYTES or len(group) == 1:
        return _Done(apply_step(step, shards))
    for rank in group:
        check_shard(step, rank, shards[rank])
    if step.kind is StepKind.ALL_REDUCE:
        return _OneSum(step, group, shards, donated, arena)
    pieces = collective_pieces(step, tuple(group))
    if step.kind is StepKind.ALL_GATHER:
        return _OneWhole(step, group, shards, pieces, arena)
    return _OwnResults(step, shards, pieces, arena)


class _Done(Shares):
    """Nothing is left to do: one rank did it all."""

    are_done = True

    def __init__(self, results: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.results = results

    def do(self, rank: int) -> None:
        """See `Shares.do`."""


class _OneSum(Shares):
    """An all-reduce: each rank reduces one stretch of all shards into one tensor for all."""

    def __init__(
        self,
        step: Step,
        group: Sequence[int],
        shards: Mapping[int, torch.Tensor],
        donated: Sequence[int],
        arena: Arena,
    ) -> None:
        super().__init__()
        self._group = list(group)
        self._reduction = reduction_of(step)
        self._parts = [shards[rank].reshape(-1) for rank in group]
        own = [shards[rank] for rank in donated if shards[rank].is_contiguous()]
        first = shards[group[0]]
        total = own[0] if own else arena.empty(first.shape, first)
        self._total = total.view(-1)
        self.results = dict.fromkeys(group, total)

    def do(self, rank: int) -> None:
        """See `Shares.do`."""
        bounds = split_bounds(len(self._total), len(self._group), self._group.index(rank))
        parts = [part[slice(*bounds)] for part in self._parts]
        reduce_in_blocks(parts, self._reduction, self._total[slice(*bounds)])


class _OneWhole(Shares):
    """An all-gather: each rank copies its pieces into one tensor for all."""

    def __init__(
        self,
        step: Step,
        group: Sequence[int],
        shards: Mapping[int, torch.Tensor],
        pieces: Sequence[Piece],
        arena: Arena,
    ) -> None:
        super().__init__()
        # What one rank gets is what each gets.
        self._pieces = [piece for piece in pieces if piece.receiver == group[0]]
        self._shards = shards
        self._whole = arena.empty(_local_shape(step, group[0]), shards[group[0]])
        self.results = dict.fromkeys(group, self._whole)

    def do(self, rank: int) -> None:
        """See `Shares.do`."""
        for piece in self._pieces:
            if piece.sender == rank:
                part = self._shards[rank][piece.source_slices]
                self._whole[piece.target_slices].copy_(part)


class _OwnResults(Shares):
    """A reduce-scatter or all-to-all: each rank makes its own result of the pieces for it."""

    def __init__(
        self,
        step: Step,
        shards: Mapping[int, torch.Tensor],
        pieces: Sequence[Piece],
        arena: Arena,
    ) -> None:
        super().__init__()
        self._step, self._shards, self._pieces, self._arena = step, shards, pieces, arena

    def do(self, rank: int) -> None:
        """See `Shares.do`."""
        mine = [piece for piece in self._pieces if piece.receiver == rank]
        parts = [self._shards[piece.sender][piece.source_slices] for piece in mine]
        result = self._arena.empty(_local_shape(self._step, rank), self._shards[rank])
        if self._step.kind is StepKind.REDUCE_SCATTER and parts:
            # Each piece is all of the result, as one rank holds it.
            reduce_in_blocks(parts, reduction_of(self._step), result)
        else:
            for piece, part in zip(mine, parts, strict=True):
                result[piece.target_slices].copy_(part)
        self.results[rank] = result


def _local_shape(step: Step, rank: int) -> tuple[int, ...]:
    bounds = bounds_of(step.shape, *step.target)[rank]
    return tuple(stop - start for start, stop in bounds)


def reduce_in_blocks(parts: Sequence[torch.Tensor], reduction: str, out: torch.Tensor) -> None:
    """Reduce tensors of one shape elementwise, from the first to the last, a block at a time.

    Args:
        parts: At least one; never changed, but for one that is `out`.
        reduction: `sum`, `max` or `min`.
        out: Where the result is made; it may be any of the parts.
    """
    if len(parts) <= 2:
        reduce_in_order(parts, reduction, out=out)
        return
    if all(part.is_contiguous() for part in (*parts, out)):
        parts, out = [part.view(-1) for part in parts], out.view(-1)
    if not out.numel():
        return
    dim = max(range(out.dim()), key=lambda dim: out.shape[dim])
    line_bytes = out.nbytes // out.shape[dim]
    extent = max(1, _BLOCK_BYTES // line_bytes)
    for start in range(0, out.shape[dim], extent):
        length = min(extent, out.shape[dim] - start)
        blocks = [part.narrow(dim, start, length) for part in parts]
        place = out.narrow(dim, start, length)
        # `out` may be a part that comes later: it is written last.
        *first, last = blocks
        reduce_in_order(
            [reduce_in_order(first, reduction), last] if first else blocks, reduction, out=place
        )
