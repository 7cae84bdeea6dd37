"""What the backend asks of a GPU and of NCCL: all of it, so that tests can stand in for a GPU.

Tensors are given as addresses, element counts and dtype names (`wire.NATIVE`). Every method may
raise `RuntimeError` with what CUDA or NCCL says.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StreamEvent(ABC):
    """A moment on a stream: when all that the stream was given before is done."""

    @abstractmethod
    def is_done(self) -> bool:
        """Say whether the moment has come; does not wait."""

    @abstractmethod
    def hold_back(self) -> None:
        """Let what torch's current stream is given from now on wait; the host goes on."""


class NcclChannel(ABC):
    """One NCCL communicator and the stream that its work runs on, in the order of the calls.

    Used by one thread at a time, but for `abort`. A call returns once its work is on the stream;
    until all ranks have made the same first call it may keep the host, which `abort` ends. `index`
    and `peer` count the ranks of the communicator from 0.
    """

    @abstractmethod
    def wait_for(self, event: StreamEvent) -> None:
        """Let the work that follows wait for an event; the host goes on."""

    @abstractmethod
    def all_reduce(self, sent: int, received: int, count: int, dtype: str, reduction: str) -> None:
        """Reduce `count` elements at `sent` over all ranks into `received`, on all of them."""

    @abstractmethod
    def reduce_scatter(
        self, sent: int, received: int, count: int, dtype: str, reduction: str
    ) -> None:
        """Reduce chunks of `count` elements at `sent`, chunk i into `received` of rank i."""

    @abstractmethod
    def all_gather(self, sent: int, received: int, count: int, dtype: str) -> None:
        """Copy `count` elements at `sent` of rank i into chunk i at `received` of all."""

    @abstractmethod
    def send(self, values: int, count: int, dtype: str, peer: int) -> None:
        """Send elements; the work is over when the peer has received them."""

    @abstractmethod
    def receive(self, values: int, count: int, dtype: str, peer: int) -> None:
        """Receive elements."""

    @abstractmethod
    def record(self) -> StreamEvent:
        """Return the moment when all that was called so far is done."""

    @abstractmethod
    def check(self) -> None:
        """Raise `RuntimeError` if NCCL has found a failure since."""

    @abstractmethod
    def abort(self) -> None:
        """End all work, done or not, and calls that keep the host; the channel is of no more use.

        May be called while another thread is inside another method.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Release the communicator; all ranks do, and nothing is under way."""


class NcclDevice(ABC):
    """The GPU of this process.

    Args:
        torch_device: Where its tensors live.
        host: Name of the machine.
        bus_id: PCI bus id of the GPU, which no other GPU of the machine has.
        nccl_version: Of the NCCL that is used: (major, minor, patch).
    """

    torch_device: torch.device
    host: str
    bus_id: str
    nccl_version: tuple[int, int, int]

    @abstractmethod
    def use(self) -> None:
        """Make the calling thread use this GPU; each thread does so before anything else."""

    @abstractmethod
    def unique_id(self) -> bytes:
        """Return the name by which the ranks of one new communicator find each other."""

    @abstractmethod
    def connect(self, size: int, unique_id: bytes, index: int) -> NcclChannel:
        """Make a communicator with `size` ranks; waits for all of them, without a limit."""

    @abstractmethod
    def record(self) -> StreamEvent:
        """Return the moment when all that torch's current stream was given so far is done."""

    @abstractmethod
    def group_start(self) -> None:
        """Let the calls of this thread that follow, on any channels, start as one."""

    @abstractmethod
    def group_end(self) -> None:
        """Start what was called since `group_start`."""

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Start the calls inside as one, so that none of them waits for another."""
        self.group_start()
        try:
            yield
        finally:
            self.group_end()
