"""Compute the memory that a rank needs while a boxing step (collective, transfer, local step) runs.

The router compares conversions of a tensor by it; `memory.prediction` includes it in the memory of
a plan. While a step runs, a rank holds its shard from before, its shard from after, and buffers:

| step | buffers |
|---|---|
| local | none; if the slice is unchanged, the shard after takes the place of the shard before |
| all-reduce | none: the result is a copy of the shard, reduced in place |
| reduce-scatter | the shard once more, cut into the parts for each rank |
| all-gather | the data of the other ranks, before they are put together |
| all-to-all | the packed data for other ranks, and the data received from them |
| transfer | a packed copy for each receiver, and every received term before it is reduced |

This is the most that an executor of `sbp_torch.boxing` takes; it may share memory where that is
safe (a slice that is a view, a shard that was donated). A transport may hold more. Sums of bool and
int16 are exchanged over gloo and converted over NCCL, which takes up to two shards more. MPI keeps
up to 16 MB of scratch for each group, and its all-reduces below 64 KB hold the shards of all ranks.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sbp_core.boxing.slices import (
    TransferPiece,
    bounds_of,
    collective_pieces,
    itemsize,
    overlap,
    transfer_pieces,
    volume,
)
from sbp_core.boxing.step import BoxingStep, StepKind

Amount = TypeVar("Amount", int, npt.NDArray[np.int64])


def held_at_once(
    kind: StepKind, before: Amount, after: Amount, sent: Amount, received: Amount
) -> Amount:
    """Return the memory of a rank while a step runs; numbers or arrays, all in one unit.

    Args:
        kind: Kind of the step.
        before: The rank's shard under the step's source.
        after: The rank's shard under its target.
        sent: The data for other ranks, once for each; in a local step, the dropped data.
        received: The data from other ranks; in a local step, the zeros that are filled in.
    """
    shards = before + after
    if kind is StepKind.LOCAL:
        stays: Amount = before * (sent + received == 0)
        return shards - stays
    if kind is StepKind.REDUCE_SCATTER:
        return shards + before
    if kind is StepKind.ALL_GATHER:
        return shards + received
    if kind in (StepKind.ALL_TO_ALL, StepKind.TRANSFER):
        return shards + sent + received
    return shards


def step_memory_bytes(step: BoxingStep) -> dict[int, int]:
    """Return the most memory of each rank while a step runs, in bytes, shards included."""
    size = itemsize(step.dtype)
    held, wanted = bounds_of(step.shape, *step.source), bounds_of(step.shape, *step.target)
    ranks = dict.fromkeys((*held, *wanted))
    sent, received = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    pieces: tuple[TransferPiece, ...] = ()
    if step.kind is StepKind.TRANSFER:
        pieces = transfer_pieces(step)
    elif step.kind is StepKind.LOCAL:
        for rank in ranks:
            kept = overlap(held[rank], wanted[rank])
            sent[rank] = (volume(held[rank]) - kept) * size
            received[rank] = (volume(wanted[rank]) - kept) * size
    elif step.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL):
        groups = step.source[0].groups(*step.axes)
        pieces = tuple(piece for group in groups for piece in collective_pieces(step, group))
    for piece in pieces:
        if piece.sender != piece.receiver:
            sent[piece.sender] += piece.size_bytes
            received[piece.receiver] += piece.size_bytes
    return {
        rank: held_at_once(
            step.kind,
            volume(held[rank]) * size if rank in held else 0,
            volume(wanted[rank]) * size if rank in wanted else 0,
            sent[rank],
            received[rank],
        )
        for rank in ranks
    }
