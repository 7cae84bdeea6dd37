"""Collectives on flat tensors in one set of ranks that NCCL connects.

It converts tensors to addresses, dtypes and streams; `nccl_communicator` decides which data is
moved. Data is moved as bytes; it is reduced in a dtype that NCCL can reduce, with the same result.
Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice, StreamEvent
from sbp_core.boxing import TrafficCounter

#: dtype of torch that NCCL supports -> its name for `NcclChannel`.
NATIVE: dict[torch.dtype, str] = {
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

#: dtype -> (dtype that is reduced instead, reductions to replace).
_STAND_INS: dict[torch.dtype, tuple[torch.dtype, dict[str, str]]] = {
    torch.bool: (torch.uint8, {"sum": "max"}),  # torch adds bools as `or`
    torch.int16: (torch.int32, {}),
}


def reducible(values: torch.Tensor, reduction: str) -> tuple[torch.Tensor, str]:
    """Return equivalent values and an equivalent reduction that NCCL supports.

    Args:
        values: Shape (elements,), contiguous, any dtype; complex only for `sum`.
        reduction: `sum`, `max` or `min`.

    Returns:
        The values themselves or a view of them, if possible; else a copy.
    """
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1), reduction
    dtype, renamed = _STAND_INS.get(values.dtype, (values.dtype, {}))
    return values.to(dtype), renamed.get(reduction, reduction)


def restored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert the reduced result of `reducible` back to the original dtype; shape (elements,)."""
    if dtype.is_complex:
        return torch.view_as_complex(values.reshape(-1, 2))
    return values.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclWork:
    """Unfinished work on the stream of a channel.

    Args:
        event: Event at its end.
        channel: The channel.
        tensors: The tensors that it reads and writes, kept alive until its end.
    """

    event: StreamEvent
    channel: NcclChannel
    tensors: tuple[torch.Tensor, ...]

    def is_done(self) -> bool:
        """Return whether it is complete.

        Raises:
            RuntimeError: NCCL has detected a failure.
        """
        self.channel.check()
        return self.event.is_done()


def launch(
    device: NcclDevice, channel: NcclChannel, start: Callable[[], None], *tensors: torch.Tensor
) -> NcclWork:
    """Start work that waits for torch's current stream to compute its input; return it.

    Args:
        device: Device of the tensors.
        channel: The channel to use.
        start: Calls the channel.
        tensors: The tensors that it reads and writes.
    """
    channel.wait_for(device.record())
    start()
    return NcclWork(event=channel.record(), channel=channel, tensors=tensors)


class NcclGroup:
    """A set of connected ranks; list positions are indices into `ranks`.

    Each method starts work and returns it. Tensors are shape (elements,), contiguous, on the
    device, of a dtype in `NATIVE` if they are reduced. Raises `RuntimeError`. `traffic` counts the
    bytes that are sent to other ranks.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, channel: NcclChannel, device: NcclDevice
    ) -> None:
        self.ranks = ranks
        self._index = ranks.index(rank)
        self.traffic = TrafficCounter(len(ranks), self._index)
        self._channel = channel
        self._device = device

    def all_reduce(self, received: torch.Tensor, sent: torch.Tensor, reduction: str) -> NcclWork:
        """Reduce `sent` over all ranks into `received`, which may be the same tensor."""
        self.traffic.all_reduce(sent.numel(), sent.element_size())
        values = sent.data_ptr(), received.data_ptr(), sent.numel(), NATIVE[sent.dtype]
        start = partial(self._channel.all_reduce, *values, reduction)
        return launch(self._device, self._channel, start, received, sent)

    def reduce_scatter(
        self, received: torch.Tensor, sent: torch.Tensor, reduction: str
    ) -> NcclWork:
        """Reduce equal chunks of `sent` over all ranks, chunk i into `received` of rank i."""
        count = received.numel()
        assert sent.numel() == count * len(self.ranks), "the chunks are of one size"
        self.traffic.even_exchange(sent.nbytes)
        values = sent.data_ptr(), received.data_ptr(), count, NATIVE[sent.dtype]
        start = partial(self._channel.reduce_scatter, *values, reduction)
        return launch(self._device, self._channel, start, received, sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> NcclWork:
        """Copy `sent` of rank i into chunk i of `received` of all ranks; all chunks of one size."""
        assert received.nbytes == sent.nbytes * len(self.ranks), "the chunks are of one size"
        self.traffic.all_gather(sent.nbytes)
        places = sent.data_ptr(), received.data_ptr()
        start = partial(self._channel.all_gather, *places, sent.nbytes, "uint8")
        return launch(self._device, self._channel, start, received, sent)

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> NcclWork:
        """Send consecutive chunks of `sent` to the ranks in order, and receive their chunks.

        Args:
            received: Buffer for the received chunks.
            sent: Chunks to send, of the same dtype.
            received_sizes: Number of elements from each rank, >= 0.
            sent_sizes: Number of elements to each rank, >= 0; equal for this rank itself.
        """
        size, here = sent.element_size(), self._index
        self.traffic.exchange(sent_sizes, size)
        if sent_sizes[here]:
            own_in = torch.split(received, list(received_sizes))[here]
            own_in.copy_(torch.split(sent, list(sent_sizes))[here])

        def start() -> None:
            source, target = sent.data_ptr(), received.data_ptr()
            with self._device.grouped():
                for peer, (out, into) in enumerate(zip(sent_sizes, received_sizes, strict=True)):
                    if out and peer != here:
                        self._channel.send(source, out * size, "uint8", peer)
                    if into and peer != here:
                        self._channel.receive(target, into * size, "uint8", peer)
                    source, target = source + out * size, target + into * size

        return launch(self._device, self._channel, start, received, sent)
