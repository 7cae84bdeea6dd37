"""What a rank keeps of its own in a boxing step, so that no new storage is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from sbp_core.boxing.slices import (
    Bounds,
    bounds_of,
    local_transition,
    overlap,
    transfer_pieces,
    volume,
)
from sbp_core.boxing.step import BoxingStep, StepKind


def own_piece(step: BoxingStep, rank: int) -> Bounds | None:
    """Return the slice of a rank's shard that is all it has after the step, if it is one.

    Args:
        step: That moves slices: no all-reduce.
        rank: Of the placement before the step, after it, or both.
    """
    # Several pieces are put together in a new storage, and what comes from others is one anyhow.
    if step.kind is StepKind.TRANSFER:
        return _kept_in_transfer(step).get(rank)
    held, wanted = (bounds_of(step.shape, *end) for end in (step.source, step.target))
    # Most ranks are given something by another one, so that few of the group are looked at.
    if any(other != rank and overlap(held[other], wanted[rank]) for other in step.group(rank)):
        return None
    kept, _ = local_transition(step, rank)
    return kept if volume(kept) else None


@lru_cache(maxsize=64)
def _kept_in_transfer(step: BoxingStep) -> Mapping[int, Bounds]:
    """Return what `own_piece` does, by rank: looked for once for all ranks of a step."""
    (before, _), (after, _) = step.source, step.target
    if not set(before.rank_list) & set(after.rank_list):
        return {}  # from stage to stage
    found: dict[int, list[Bounds | None]] = {}
    for piece in transfer_pieces(step):
        own = piece.source if piece.sender == piece.receiver else None
        found.setdefault(piece.receiver, []).append(own)
    return {rank: own for rank, (own, *more) in found.items() if own is not None and not more}
