"""Share the work of a collective among the ranks of one process: any thread does the next block.

The rank that arrives last divides the work. For a small tensor, it does all the work at once.
Otherwise results are made block by block in memory of the pool, one result for all ranks if all get
the same:

    shards, P -> S(0)      jobs                      blocks, which all threads take from one list
    rank 0   a0 | b0       a = a0 + a1, of rank 0    a[0:4]  a[4:8]  a[8:12]
    rank 1   a1 | b1       b = b0 + b1, of rank 1    b[0:4]  b[4:8]  b[8:12]

A block belongs to no rank: a rank that wakes up late, or gets no core, takes none and delays no
other rank. One thread does a whole block, and adds in mesh order, (0 + 1) + 2, because
floating-point sums depend on the order. This module never waits: `local` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sbp_core.boxing import (
    BoxingStep,
    StepKind,
    TrafficCounter,
    TransferPiece,
    bounds_of,
    collective_pieces,
)
from sbp_torch.boxing.buffer_pool import BufferPool
from sbp_torch.boxing.execute import check_shard, combine, reduce_in_order, reduction_of

#: Bytes of all shards below which the rank that arrives last makes the results alone, in memory of
#: the allocator, because cutting such a tensor and taking blocks of the pool would cost more.
_SMALL_BYTES = 256 * 1024

#: Bytes of all shards from which on other ranks are woken to help. Waking a thread takes about 0.05
#: ms, and then both threads wait for each other between any two calls of torch; one core copies as
#: much in 0.3 ms. Source: Linux, two cores of an AMD EPYC.
_SHARED_BYTES = 4 * 1024 * 1024

#: Bytes of a result per block; smaller blocks spend more time on calls. If more than two shards are
#: reduced, the sum of the first two is still in the cache when the next one is added.
_BLOCK_BYTES = 1024 * 1024

#: A job, and the start and extent of a block along the dim of the job.
_Block = tuple["_Job", int, int]


class _Job:
    """Tensors to reduce elementwise, in order, or one tensor to copy.

    Args:
        parts: Tensors of one shape: slices of the shards, which are only read.
        out: The tensor for the result, of that shape; it may be any of the parts.
        reduction: `sum`, `max` or `min`.
    """

    __slots__ = ("_dim", "_out", "_parts", "_reduction")

    def __init__(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: str = "sum"
    ) -> None:
        self._parts, self._out, self._reduction = parts, out, reduction
        self._dim = 0

    def blocks(self) -> list[_Block]:
        """Cut the job into blocks along its first dim, which keeps them contiguous, if possible."""
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
        """Do one block, or the whole job if `extent` is 0.

        Any number of threads may do blocks of one job: they write disjoint parts of its result.
        """
        parts, out = self._parts, self._out
        if extent:
            parts = [part.narrow(self._dim, start, extent) for part in parts]
            out = out.narrow(self._dim, start, extent)
        if len(parts) > 2 and out.data_ptr() in [part.data_ptr() for part in parts[2:]]:
            # The result replaces a shard that is added third or later. `reduce_in_order` would
            # write the sum of the first two into it, and then add the overwritten values. So all
            # addends except the last are summed in other memory.
            parts = [reduce_in_order(parts[:-1], self._reduction), parts[-1]]
        reduce_in_order(parts, self._reduction, out=out)


class SharedStep:
    """A collective, cut into blocks that any thread may do, and its results.

    Args:
        results: By rank, its part under the step's target once all blocks are done.
        sent_bytes: By rank, the bytes of its shard that were used for other ranks; see
            `share_out`.
        jobs: The jobs that make the results; none if the results are already made.
        needs_help: Whether other ranks should be woken to do blocks.
    """

    def __init__(
        self,
        results: Mapping[int, torch.Tensor],
        sent_bytes: Mapping[int, int],
        jobs: Sequence[_Job] = (),
        *,
        needs_help: bool = False,
    ) -> None:
        self.results = results
        self.sent_bytes = sent_bytes
        self.needs_help = needs_help
        blocks = [block for job in jobs for block in job.blocks()]
        self.num_blocks = len(blocks)
        # One iterator for all threads: `next` is atomic, so each block is taken once.
        self._next = iter(blocks)

    def do(self) -> int:
        """Do blocks until none is left; return the number of blocks done."""
        done = 0
        for job, start, extent in self._next:
            job.do(start, extent)
            done += 1
        return done


def share_out(
    step: BoxingStep,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    donated: Sequence[int],
    pool: BufferPool,
) -> SharedStep:
    """Divide a collective, and count the bytes that its ranks send to each other.

    The count uses the sizes of the slices of shards that results are made of, not the prediction of
    the step. Threads share memory: a result for all ranks is made once, and a thread that does a
    block reads shards for other ranks. The count is therefore that of ranks that share no memory,
    by the `TrafficCounter` of their backends. A slice counts for its owner, once for each other
    rank that gets a result made of it. An all-reduce counts as a reduce-scatter and an all-gather,
    as in these backends and in its price.

    Args:
        step: A step of any kind except `TRANSFER` and `LOCAL`.
        group: The ranks of the group, in mesh order.
        shards: The shards of all ranks of the group.
        donated: The ranks whose shard may be overwritten, and may become the result.
        pool: The pool for results.

    Raises:
        BoxingError: a shard has another shape or dtype than the step gives.
    """
    for rank in group:
        check_shard(step, rank, shards[rank])
    size_bytes = sum(shards[rank].nbytes for rank in group)
    memory = None if size_bytes < _SMALL_BYTES or len(group) == 1 else pool
    counters = [TrafficCounter(len(group), place) for place in range(len(group))]
    if step.kind is StepKind.ALL_REDUCE:
        results, jobs = _one_sum(step, group, shards, donated, memory, counters)
    else:
        results, jobs = _put_together(step, group, shards, memory, counters)
    sent_bytes = {rank: counter.take() for rank, counter in zip(group, counters, strict=True)}
    return SharedStep(results, sent_bytes, jobs, needs_help=size_bytes >= _SHARED_BYTES)


def _one_sum(
    step: BoxingStep,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    donated: Sequence[int],
    pool: BufferPool | None,
    counters: Sequence[TrafficCounter],
) -> tuple[dict[int, torch.Tensor], list[_Job]]:
    """Return the result of an all-reduce, and the jobs that make it: none without a pool."""
    parts, reduction = [shards[rank] for rank in group], reduction_of(step)
    for part, counter in zip(parts, counters, strict=True):
        counter.all_reduce(part.numel(), part.element_size())
    if pool is None:
        return dict.fromkeys(group, reduce_in_order(parts, reduction).contiguous()), []
    # If possible, make the result in a donated shard, which saves memory and does not touch more of
    # it. For every choice, the order of the sum is the mesh order (`_Job.do`).
    own = [shards[rank] for rank in group if rank in donated and shards[rank].is_contiguous()]
    total = own[0] if own else pool.empty(parts[0].shape, parts[0])
    job = _Job([part.reshape(-1) for part in parts], total.view(-1), reduction)
    return dict.fromkeys(group, total), [job]


def _put_together(
    step: BoxingStep,
    group: Sequence[int],
    shards: Mapping[int, torch.Tensor],
    pool: BufferPool | None,
    counters: Sequence[TrafficCounter],
) -> tuple[dict[int, torch.Tensor], list[_Job]]:
    """Return the results of any other collective, and the jobs for them: none without a pool."""
    # Each rank gets the same result of an all-gather: it is made once, for the first rank.
    gathers = step.kind is StepKind.ALL_GATHER
    received: dict[int, list[tuple[TransferPiece, torch.Tensor]]]
    received = {rank: [] for rank in (group[:1] if gathers else group)}
    place = {rank: index for index, rank in enumerate(group)}
    sizes = [[0] * len(group) for _ in group]
    for piece in collective_pieces(step, tuple(group)):
        if piece.receiver in received:
            part = shards[piece.sender][piece.source_slices]
            received[piece.receiver].append((piece, part))
            sizes[place[piece.sender]][place[piece.receiver]] = part.nbytes
    for row, counter in zip(sizes, counters, strict=True):
        if gathers:
            counter.all_gather(row[0])
        else:
            counter.exchange(row)

    results: dict[int, torch.Tensor] = {}
    jobs: list[_Job] = []
    for rank, pieces in received.items():
        if pool is None:
            results[rank] = combine(step, rank, pieces, device=shards[rank].device)
            continue
        bounds = bounds_of(step.shape, *step.target)[rank]
        result = pool.empty([stop - start for start, stop in bounds], shards[rank])
        results[rank] = result
        if step.kind is not StepKind.REDUCE_SCATTER:
            jobs += [_Job([part], result[piece.target_slices]) for piece, part in pieces]
        elif pieces:  # the addends of the result, in mesh order; an empty result has none
            jobs.append(_Job([part for _, part in pieces], result, reduction_of(step)))
    return dict.fromkeys(group, results[group[0]]) if gathers else results, jobs
