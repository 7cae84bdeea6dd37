"""One set of ranks that NCCL connects: collectives on flat tensors.

Knows tensors, addresses and streams, not steps: `nccl_communicator` says what is moved. Moves go as
bytes; reductions go in a dtype that NCCL reduces, with the same result. Nothing here waits for the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice, StreamEvent
from sbp_core.boxing import TrafficCounter

#: The dtypes of torch that NCCL knows, by the names that `NcclChannel` is given.
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

#: dtype -> (dtype that is reduced instead, reductions that change their name).
_STAND_INS: dict[torch.dtype, tuple[torch.dtype, dict[str, str]]] = {
    torch.bool: (torch.uint8, {"sum": "max"}),  # torch adds truth values as `or`
    torch.int16: (torch.int32, {}),
}


def reducible(values: torch.Tensor, reduction: str) -> tuple[torch.Tensor, str]:
    """Return values that NCCL can reduce, and the reduction, with the result that is asked for.

    Args:
        values: Shape (elements,), contiguous, any dtype; complex ones for `sum` only.
        reduction: `sum`, `max` or `min`.

    Returns:
        The values themselves or a view of them where that is enough; else a copy.
    """
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1), reduction
    dtype, renamed = _STAND_INS.get(values.dtype, (values.dtype, {}))
    return values.to(dtype), renamed.get(reduction, reduction)


def restored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what `reducible` made, reduced, in the dtype it was made of; shape (elements,)."""
    if dtype.is_complex:
        return torch.view_as_complex(values.reshape(-1, 2))
    return values.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclWork:
    """Something that is under way on the stream of a channel.

    Args:
        event: When it is over.
        channel: That does it.
        tensors: What it reads and writes; not to be freed before.
    """

    event: StreamEvent
    channel: NcclChannel
    tensors: tuple[torch.Tensor, ...]

    def is_done(self) -> bool:
        """Say whether it is over.

        Raises:
            RuntimeError: NCCL has found a failure.
        """
        self.channel.check()
        return self.event.is_done()


def launch(
    device: NcclDevice, channel: NcclChannel, start: Callable[[], None], *tensors: torch.Tensor
) -> NcclWork:
    """Start work once torch's current stream has made its input; return it.

    Args:
        device: Of the tensors.
        channel: That works.
        start: Calls the channel.
        tensors: That it reads and writes.
    """
    channel.wait_for(device.record())
    start()
    return NcclWork(event=channel.record(), channel=channel, tensors=tensors)


class NcclGroup:
    """A set of ranks that are connected; list positions count within `ranks`.

    Each method starts something and returns it. Tensors are shape (elements,), contiguous, on the
    device, of a dtype in `NATIVE` where they are reduced. Raises `RuntimeError`. `traffic`
    counts what is given for others.
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
        """Copy `sent` of rank i into chunk i of `received` of all; all chunks of one size."""
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
        """Send consecutive chunks of `sent` to ranks in order, and receive theirs likewise.

        Args:
            received: To be filled.
            sent: Of the same dtype.
            received_sizes: Elements from each rank, any number.
            sent_sizes: Elements to each rank; to this one itself as many as from it.
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
