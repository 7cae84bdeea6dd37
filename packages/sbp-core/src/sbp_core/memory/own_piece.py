"""What a rank keeps of its own in a boxing step, so that no new storage is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from sbp_core.boxing.slices import Piece, collective_pieces, transfer_pieces
from sbp_core.boxing.step import BoxingStep, StepKind


def own_piece(step: BoxingStep, rank: int) -> Piece | None:
    """Return the piece of a rank's shard that is all it has after the step, if it is one."""
    group = () if step.kind is StepKind.TRANSFER else step.group(rank)
    return _own_pieces(step, group).get(rank)


@lru_cache(maxsize=1024)
def _own_pieces(step: BoxingStep, group: tuple[int, ...]) -> Mapping[int, Piece]:
    """Return what `_own_piece` does, by rank: looked for once for all ranks of a step."""
    is_transfer = step.kind is StepKind.TRANSFER
    pieces = transfer_pieces(step) if is_transfer else collective_pieces(step, group)
    received: dict[int, list[Piece]] = {}
    for piece in pieces:
        received.setdefault(piece.receiver, []).append(piece)
    # Several pieces are put together in a new storage, and what comes from others is one anyhow.
    return {
        rank: mine[0]
        for rank, mine in received.items()
        if len(mine) == 1 and mine[0].sender == rank
    }
