"""List what one rank sends and receives in a collective, and where it is in the rank's memory.

Backends of several processes pack messages by it. Worked out once for each step and rank. Pieces
need no packing or unpacking if they follow each other, in the order of the group, in the row-major
memory of a shard. In an all-gather of S(1) on two ranks, rank 0 sends its shard as it is, and has
to unpack the data that it receives:

    sent by 0    a0 a1             received   a0 a1 b0 b1        shard after   a0 b0
    sent by 1    b0 b1                                                         a1 b1

Holds no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sbp_core.boxing.slices import Bounds, TransferPiece, bounds_of, collective_pieces, volume
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.sbp import split_bounds

_CACHED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One rank's part of an all-gather, reduce-scatter or all-to-all.

    Args:
        place: Position of the rank in its group.
        held, shape: Local shape of its shard before and after.
        outgoing: The piece for each rank of the group, in order, itself included; None if there is
            nothing for it.
        incoming: The piece from each rank of the group, likewise.
        sent_sizes, received_sizes: Elements of these pieces.
        packed: Whether the outgoing pieces, one after the other, are the shard's own memory.
        unpacked: Whether the incoming pieces, one after the other, are the memory of the shard
            after the step; never in a reduce-scatter.
        apart: Whether the rank's own piece can be left out on both sides, so that the rest is one
            piece of memory wherever nothing is packed: it stays, or is at an end of the others.
        others_out, others_in: Place of the other pieces then, among all pieces: (start, stop).
        gathers: Whether every rank of the group receives the whole shards of all. Equal on all
            ranks.
        is_even: Whether every rank of the group sends every rank as many elements. Equal on all
            ranks.
        is_flat: Whether `is_even` holds and, on every rank, the outgoing pieces in order are the
            memory of the shard before (in an all-gather, each piece is), and the incoming pieces in
            order are the memory of the shard after. Equal on all ranks.
        is_idle: Whether no rank of the group sends another one anything. Equal on all ranks.
    """

    place: int
    held: tuple[int, ...]
    shape: tuple[int, ...]
    outgoing: tuple[TransferPiece | None, ...]
    incoming: tuple[TransferPiece | None, ...]
    sent_sizes: tuple[int, ...]
    received_sizes: tuple[int, ...]
    packed: bool
    unpacked: bool
    apart: bool
    others_out: tuple[int, int]
    others_in: tuple[int, int]
    gathers: bool
    is_even: bool
    is_flat: bool
    is_idle: bool


@lru_cache(maxsize=_CACHED)
def manifest_of(step: BoxingStep, rank: int) -> Manifest:
    """Return what a rank sends and receives in a step.

    Args:
        step: An all-gather, reduce-scatter or all-to-all.
        rank: Any rank of its placement.
    """
    group = step.group(rank)
    pieces = collective_pieces(step, group)
    by_ends = {(piece.sender, piece.receiver): piece for piece in pieces}
    bounds, after = bounds_of(step.shape, *step.source), bounds_of(step.shape, *step.target)
    held, shape = _shape(bounds[rank]), _shape(after[rank])
    outgoing = tuple(by_ends.get((rank, other)) for other in group)
    incoming = tuple(by_ends.get((other, rank)) for other in group)
    senders = sum(volume(bounds[other]) > 0 for other in group)
    place, packed = group.index(rank), _tiles(held, [piece.source for piece in outgoing if piece])
    unpacked = step.kind is not StepKind.REDUCE_SCATTER and _tiles(
        shape, [piece.target for piece in incoming if piece]
    )
    sent_sizes = tuple(volume(piece.source) if piece else 0 for piece in outgoing)
    received_sizes = tuple(volume(piece.target) if piece else 0 for piece in incoming)
    gathers = len(pieces) == senders * len(group) and all(
        volume(piece.source) == volume(bounds[piece.sender]) for piece in pieces
    )
    is_even = len(pieces) == len(group) ** 2 and len({piece.size_bytes for piece in pieces}) == 1

    def is_flat(one: int) -> bool:
        """Return whether the pieces of one rank are in order in its memory."""
        arriving = [by_ends[other, one].target for other in group]
        leaving = [by_ends[one, other].source for other in group]
        return _tiles(_shape(after[one]), arriving) and (
            gathers or _tiles(_shape(bounds[one]), leaving)
        )

    return Manifest(
        place=place,
        held=held,
        shape=shape,
        outgoing=outgoing,
        incoming=incoming,
        sent_sizes=sent_sizes,
        received_sizes=received_sizes,
        packed=packed,
        unpacked=unpacked,
        apart=(not packed or _is_at_an_end(sent_sizes, place))
        and (not unpacked or _is_at_an_end(received_sizes, place)),
        others_out=_others(sent_sizes, place),
        others_in=_others(received_sizes, place),
        gathers=gathers,
        is_even=is_even,
        is_flat=step.kind is not StepKind.REDUCE_SCATTER and is_even and all(map(is_flat, group)),
        is_idle=all(piece.sender == piece.receiver for piece in pieces),
    )


def span(shape: Sequence[int], bounds: Bounds) -> tuple[int, int] | None:
    """Return where a slice is in row-major memory: (start, stop) in elements; None if in parts.

    Args:
        shape: Shape of the tensor that it is a slice of.
        bounds: The slice, not empty.
    """
    start, whole = 0, True
    for extent, (first, last) in zip(reversed(shape), reversed(bounds), strict=True):
        # Inner dims must be whole, then one may be a range; outer dims have a single index.
        if not whole and last - first != 1:
            return None
        whole = whole and (first, last) == (0, extent)
    for extent, (first, _) in zip(shape, bounds, strict=True):
        start = start * extent + first
    return start, start + volume(bounds)


def _tiles(shape: tuple[int, ...], slices: Sequence[Bounds]) -> bool:
    """Return whether slices, none of them empty, follow each other and fill a tensor of a shape."""
    end = 0
    for bounds in slices:
        where = span(shape, bounds)
        if where is None or where[0] != end:
            return False
        end = where[1]
    return end == prod(shape)


def _is_at_an_end(sizes: Sequence[int], place: int) -> bool:
    """Return whether all chunks before a place, or all chunks after it, are empty."""
    return not any(sizes[:place]) or not any(sizes[place + 1 :])


def _others(sizes: Sequence[int], place: int) -> tuple[int, int]:
    """Return (start, stop) of all chunks except the one at a place, if that is at an end."""
    before = sum(sizes[:place])
    return (0, before) if before else (sizes[place], sum(sizes))


def _shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


class TrafficCounter:
    """The bytes of one rank in one group.

    The inner working of a library does not matter: a collective counts by its definition.

    | call of the library | counted bytes |
    |---|---|
    | exchange | the chunks for other ranks |
    | all-gather | the part, once for each other rank |
    | reduce-scatter | the addends of the other ranks' parts |
    | all-reduce | those addends, and the sum of the rank's own part, once for each other rank |

    Args:
        num_ranks: Ranks of the group.
        place: Position of the rank in it.
    """

    __slots__ = ("_bytes", "_num_ranks", "_place")

    def __init__(self, num_ranks: int, place: int) -> None:
        self._num_ranks, self._place = num_ranks, place
        self._bytes = 0

    def exchange(self, sizes: Sequence[int], item_bytes: int = 1) -> None:
        """Count chunks of some elements, chunk i for the i-th rank of the group."""
        size_bytes = item_bytes * (sum(sizes) - sizes[self._place])
        self._bytes += size_bytes

    def even_exchange(self, size_bytes: int) -> None:
        """Count equal chunks for all ranks, this one included; or a reduce-scatter of them."""
        self._bytes += size_bytes - size_bytes // self._num_ranks

    def all_gather(self, part_bytes: int) -> None:
        """Count a part that each other rank gets."""
        self._bytes += part_bytes * (self._num_ranks - 1)

    def all_reduce(self, elements: int, item_bytes: int) -> None:
        """Count values that are reduced in parts, the i-th by the i-th rank, for all."""
        start, stop = split_bounds(elements, self._num_ranks, self._place)
        self._bytes += item_bytes * (elements + (self._num_ranks - 2) * (stop - start))

    def take(self) -> int:
        """Return the bytes since the last call, and reset the count."""
        taken, self._bytes = self._bytes, 0
        return taken
