"""How the ranks of one process share the work of a collective: who is there does the next block.

The rank that comes last divides the work. Of a small tensor it does everything at once. Else every
result is made in memory of the arena, one for all ranks where all get the same, block by block; a
rank that is slow to wake up, or finds no core, takes no block and holds up nobody. Each block is
reduced in mesh order, so that bits do not depend on who does what. Knows torch; waits for nobody
(that is `local`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sbp_core.boxing.slices import bounds_of, collective_pieces
from sbp_core.boxing.step import Step, StepKind
from sbp_torch.boxing.buffer_pool import Arena
from sbp_torch.boxing.execute import apply_step, check_shard, reduce_in_order, reduction_of

#: Bytes of all shards below which results are made by the allocator, as `apply_step` does.
_SMALL_BYTES = 256 * 1024

#: Bytes of all shards from which on others are called for help. To wake a thread takes some 0.05 ms
#: and then both wait for each other between any two calls of torch; in 0.3 ms one core copies as
#: much alone. Source: Linux, two cores of an AMD EPYC.
_SHARED_BYTES = 4 * 1024 * 1024

#: Bytes of a result that are made at a time; smaller blocks spend more on their calls. If more than
#: two shards are reduced, what the first come to is still in the cache when the next is added.
_BLOCK_BYTES = 1024 * 1024

#: A job, and where a block of it starts and how far it reaches along the job's dim.
_Block = tuple["_Job", int, int]


class _Job:
    """Tensors to reduce elementwise, in order, or the one tensor to copy.

    Args:
        parts: Of one shape.
        out: Where the result is made, of that shape; it may be any of the parts.
        reduction: `sum`, `max` or `min`.
    """

    __slots__ = ("_dim", "_out", "_parts", "_reduction")

    def __init__(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: str = "sum"
    ) -> None:
        self._parts, self._out, self._reduction = parts, out, reduction
        self._dim = 0

    def blocks(self) -> list[_Block]:
        """Cut the job: along its first dim, whose parts lie together, unless that is too short."""
        if not self._out.numel():
            return []
        num_blocks = -(-self._out.nbytes // _BLOCK_BYTES)
        if num_blocks == 1:
            return [(self, 0, 0)]
        if all(part.is_contiguous() for part in (*self._parts, self._out)):
            self._parts, self._out = [part.view(-1) for part in self._parts], self._out.view(-1)
        shape = self._out.shape
        self._dim = 0 if shape[0] >= num_blocks else max(range(len(shape)), key=shape.__getitem__)
        size = -(-shape[self._dim] // num_blocks)
        starts = range(0, shape[self._dim], size)
        return [(self, start, min(size, shape[self._dim] - start)) for start in starts]

    def do(self, start: int, extent: int) -> None:
        """Do one block; all of the job if it has no extent."""
        parts, out = self._parts, self._out
        if extent:
            parts = [part.narrow(self._dim, start, extent) for part in parts]
            out = out.narrow(self._dim, start, extent)
        if len(parts) > 2 and out.data_ptr() in [part.data_ptr() for part in parts[2:]]:
            # What comes later must not be overwritten before.
            parts = [reduce_in_order(parts[:-1], self._reduction), parts[-1]]
        reduce_in_order(parts, self._reduction, out=out)


class Work:
    """What a collective comes to: blocks that any thread may do, and what is there after them.

    Args:
        results: By rank, its part under the step's target once all blocks are done.
        jobs: That make the results.
        needs_help: Whether others should be called to do blocks.
    """

    def __init__(
        self,
        results: dict[int, torch.Tensor],
        jobs: Sequence[_Job] = (),
        *,
        needs_help: bool = False,
    ) -> None:
        self.results = results
        self.needs_help = needs_help
        blocks = [block for job in jobs for block in job.blocks()]
        self.num_blocks = len(blocks)
        # One iterator for all threads: each block is taken once, as taking the next is atomic.
        self._next = iter(blocks)

    def do(self) -> int:
        """Do blocks for as long as there are any; return how many."""
        done = 0
        for job, start, extent in self._next:
            job.do(start, extent)
            done += 1
        return done


def share_out(
    step: Step,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    donated: Sequence[int],
    arena: Arena,
) -> Work:
    """Divide a collective.

    Args:
        step: Of any kind but `TRANSFER` and `LOCAL`.
        group: In mesh order.
        shards: Of all its ranks.
        donated: The ranks whose shard may be overwritten, and may become the result.
        arena: Where results are made.

    Raises:
        BoxingError: a shard has another shape or dtype than the step gives.
    """
    size_bytes = sum(shard.nbytes for shard in shards.values())
    if size_bytes < _SMALL_BYTES or len(group) == 1:
        return Work(apply_step(step, shards))
    for rank in group:
        check_shard(step, rank, shards[rank])
    if step.kind is StepKind.ALL_REDUCE:
        results, jobs = _one_sum(step, group, shards, donated, arena)
    else:
        results, jobs = _put_together(step, group, shards, arena)
    return Work(results, jobs, needs_help=size_bytes >= _SHARED_BYTES)


def _put_together(
    step: Step, group: Sequence[int], shards: Mapping[int, torch.Tensor], arena: Arena
) -> tuple[dict[int, torch.Tensor], list[_Job]]:
    """Return the results of any other collective, and how they are made."""
    # What one rank gets of an all-gather is what each gets.
    gathers = step.kind is StepKind.ALL_GATHER
    receivers = group[:1] if gathers else group
    results = {rank: arena.empty(_local_shape(step, rank), shards[rank]) for rank in receivers}
    pieces = [
        (piece, shards[piece.sender][piece.source_slices])
        for piece in collective_pieces(step, tuple(group))
        if piece.receiver in results
    ]
    if step.kind is StepKind.REDUCE_SCATTER:
        # Each piece is all of the result, as one rank holds it.
        jobs = [
            _Job(parts, result, reduction_of(step))
            for rank, result in results.items()
            if (parts := [part for piece, part in pieces if piece.receiver == rank])
        ]
    else:
        jobs = [
            _Job([part], results[piece.receiver][piece.target_slices]) for piece, part in pieces
        ]
    return (dict.fromkeys(group, results[group[0]]) if gathers else results), jobs


def _one_sum(
    step: Step,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    donated: Sequence[int],
    arena: Arena,
) -> tuple[dict[int, torch.Tensor], list[_Job]]:
    """Return the one tensor that an all-reduce makes for all, if possible of a donated shard."""
    own = [shards[rank] for rank in group if rank in donated and shards[rank].is_contiguous()]
    first = shards[group[0]]
    total = own[0] if own else arena.empty(first.shape, first)
    parts = [shards[rank].reshape(-1) for rank in group]
    return dict.fromkeys(group, total), [_Job(parts, total.view(-1), reduction_of(step))]


def _local_shape(step: Step, rank: int) -> tuple[int, ...]:
    bounds = bounds_of(step.shape, *step.target)[rank]
    return tuple(stop - start for start, stop in bounds)
