"""Pack the pieces of a shard for other ranks into one flat buffer, and unpack received buffers.

It serves transports between processes. `slices` and `manifest` compute which slice goes where,
`execute.fill` puts pieces together, and `exchange` sends the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from sbp_core.boxing import BoxingStep, Manifest, StepKind, TransferPiece, itemsize, volume
from sbp_torch.boxing.execute import fill, reduce_in_order, reduction_of


def pack(
    shard: torch.Tensor, pieces: Sequence[TransferPiece], *, copy: bool = False
) -> torch.Tensor:
    """Return pieces of a shard one after the other: shape (elements,), contiguous.

    Args:
        shard: A shard with any strides.
        pieces: Pieces of the shard, in any order.
        copy: Always copy, so that the result shares no memory with the shard.
    """
    if len(pieces) == 1 and not copy:
        part = shard[pieces[0].source_slices]
        if part.is_contiguous():
            return part.view(-1)
    packed = shard.new_empty(sum(volume(piece.source) for piece in pieces))
    start = 0
    for piece in pieces:
        part = shard[piece.source_slices]
        packed[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return packed


def unpack(
    pieces: Sequence[TransferPiece], buffers: Mapping[int, torch.Tensor]
) -> list[tuple[TransferPiece, torch.Tensor]]:
    """Return each piece with its values, as views.

    Args:
        pieces: The pieces of all senders; those of one sender in the order given to `pack`.
        buffers: The results of `pack`, by sender; shape (elements,).
    """
    offsets = dict.fromkeys(buffers, 0)
    values: list[tuple[TransferPiece, torch.Tensor]] = []
    for piece in pieces:
        shape = tuple(stop - start for start, stop in piece.target)
        start = offsets[piece.sender]
        offsets[piece.sender] = start + prod(shape)
        values.append((piece, buffers[piece.sender][start : start + prod(shape)].view(shape)))
    return values


def num_elements(step: BoxingStep, pieces: Sequence[TransferPiece]) -> int:
    """Return the total number of elements of some pieces of a step."""
    return sum(piece.size_bytes for piece in pieces) // itemsize(step.dtype)


class PackedBuffers:
    """The flat buffers of one collective on one rank: one to send, and one to receive.

    Chunk i of a buffer goes to, or comes from, the i-th rank of the group. If pieces are in order,
    the send buffer is the shard itself, and the receive buffer is the memory of the result. The
    rank's own chunk is left out of both if possible, which saves a copy; otherwise it is in both,
    and the transport has to copy it like any other chunk.

    Args:
        step: An all-gather, reduce-scatter or all-to-all.
        manifest: The pieces that the rank sends and receives.
        shard: The rank's part under `step.source`; never changed.
        device: The device of the result.
        with_own: Always include the rank's own chunk, for transports whose collectives need chunks
            of equal size.
        whole: For an all-gather in which all ranks receive whole shards: send the shard as one
            chunk for all ranks. The rank's own chunk is in `received`, to be filled by the
            transport or by `keep_own`.

    Attributes:
        sent, received: Shape (elements,), contiguous.
        sent_sizes, received_sizes: Elements of each chunk.
    """

    def __init__(
        self,
        step: BoxingStep,
        manifest: Manifest,
        shard: torch.Tensor,
        *,
        device: torch.device,
        with_own: bool = False,
        whole: bool = False,
    ) -> None:
        self._step, self._manifest, self._shard = step, manifest, shard
        # The own chunk is left out of both buffers if the other chunks are then still contiguous:
        #
        #     shard of rank 0    | own  | to 1 | to 2 |     sent: the last two chunks, a view
        #     shard of rank 1    | to 0 | own  | to 2 |     the own chunk stays in both
        apart, place = manifest.apart and not (with_own or whole), manifest.place
        self._keeps_own = apart or whole
        self._awaits_own = apart
        self.sent_sizes, self.received_sizes = manifest.sent_sizes, manifest.received_sizes
        if apart:
            self.sent_sizes = _with_empty_chunk(self.sent_sizes, place)
            self.received_sizes = _with_empty_chunk(self.received_sizes, place)
        if manifest.packed or whole:
            self.sent = _flat(shard.contiguous(), manifest.others_out if apart else None)
        else:
            outgoing = enumerate(manifest.outgoing)
            self.sent = pack(
                shard, [piece for at, piece in outgoing if piece and not (apart and at == place)]
            )
        # The result of a reduce-scatter is made last: it may reuse the memory of received chunks.
        self._result: torch.Tensor | None = None
        if step.kind is not StepKind.REDUCE_SCATTER:
            self._result = torch.empty(manifest.shape, dtype=shard.dtype, device=device)
        if manifest.unpacked and self._result is not None:
            self.received = _flat(self._result, manifest.others_in if apart else None)
        else:
            elements = sum(self.received_sizes)
            self.received = torch.empty(elements, dtype=shard.dtype, device=device)

    def keep_own(self) -> None:
        """Copy the rank's own pieces into the result now, while chunks may be in transit."""
        piece = self._manifest.incoming[self._manifest.place]
        if self._keeps_own and piece is not None and self._result is not None:
            self._result[piece.target_slices] = self._shard[piece.source_slices]
        self._awaits_own = False

    def result(self) -> torch.Tensor:
        """Return the rank's part under `step.target`, after all chunks are received."""
        if self._result is None:
            return self._reduce()
        if self._awaits_own:
            self.keep_own()
        if not self._manifest.unpacked:
            fill(
                self._result,
                [
                    (piece, part)
                    for piece, part in self._pieces()
                    if not (self._keeps_own and piece.sender == piece.receiver)
                ],
            )
        return self._result

    def _pieces(self) -> list[tuple[TransferPiece, torch.Tensor]]:
        """Return each incoming piece with its values."""
        chunks = torch.split(self.received, list(self.received_sizes))
        pieces: list[tuple[TransferPiece, torch.Tensor]] = []
        for piece, chunk in zip(self._manifest.incoming, chunks, strict=True):
            if piece is None:
                continue
            if self._keeps_own and piece.sender == piece.receiver:
                pieces.append((piece, self._shard[piece.source_slices]))
            else:
                shape = [stop - start for start, stop in piece.target]
                pieces.append((piece, chunk.view(shape)))
        return pieces

    def _reduce(self) -> torch.Tensor:
        """Return the reduction, in the order of the group."""
        shape, addends = self._manifest.shape, [part for _, part in self._pieces()]
        if self._keeps_own and len(addends) == 2:
            # There is one received chunk: its memory becomes the result.
            result = self.received.view(shape)
        else:
            result = self.received.new_empty(shape)
        if addends:
            reduce_in_order(addends, reduction_of(self._step), out=result)
        return result


def _flat(values: torch.Tensor, where: tuple[int, int] | None) -> torch.Tensor:
    """Return contiguous values, or a part of them, as shape (elements,)."""
    flat = values.view(-1)
    return flat if where is None else flat.narrow(0, where[0], where[1] - where[0])


def _with_empty_chunk(sizes: tuple[int, ...], place: int) -> tuple[int, ...]:
    """Return sizes of chunks with size 0 at one place."""
    return (*sizes[:place], 0, *sizes[place + 1 :])
