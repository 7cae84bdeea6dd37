"""Shards to flat messages and back: the pieces for one rank, one after the other.

For transports between processes. The geometry (which slice goes where) is `slices`, putting pieces
together is `execute.combine`, when parcels are sent is `exchange`. Knows torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from sbp_core.boxing.slices import Piece, itemsize
from sbp_core.boxing.step import Step


def pack(shard: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return pieces of a shard one after the other: shape (elements,), contiguous.

    The result may share memory with the shard.
    """
    parts = [shard[piece.source_slices].reshape(-1) for piece in pieces]
    if len(parts) == 1:
        return parts[0].contiguous()  # a single column is a view with gaps
    return torch.cat(parts) if parts else shard.new_empty(0)


def unpack(
    pieces: Sequence[Piece], parcels: Mapping[int, torch.Tensor]
) -> list[tuple[Piece, torch.Tensor]]:
    """Return each piece with its values, as views.

    Args:
        pieces: In the order in which `pack` had those of each sender.
        parcels: What `pack` returned, by sender; shape (elements,).
    """
    starts = dict.fromkeys(parcels, 0)
    values: list[tuple[Piece, torch.Tensor]] = []
    for piece in pieces:
        shape = tuple(stop - start for start, stop in piece.target)
        start = starts[piece.sender]
        starts[piece.sender] = start + prod(shape)
        values.append((piece, parcels[piece.sender][start : start + prod(shape)].reshape(shape)))
    return values


def num_elements(step: Step, pieces: Sequence[Piece]) -> int:
    """Return the number of elements of some pieces of a step."""
    return sum(piece.size_bytes for piece in pieces) // itemsize(step.dtype)
