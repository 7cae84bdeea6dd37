"""A stand-in for a GPU and its NCCL, which moves data between ranks on CPUs.

It reads and writes real memory by the addresses and counts that it is given, and behaves like NCCL
where that matters:

* what is called runs on the stream of the channel, in order, behind the caller's back;
* a send is over when the peer has received it, so that a wrong order of messages hangs;
* calls between `group_start` and `group_end` run at the same time;
* two ranks that call different things fail, or hang;
* making a communicator waits for all ranks, for ever;
* work that was aborted counts as done.

Ranks are threads that share a `Network`, or processes of MPI (`fake_network.MpiNetwork`).
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice, StreamEvent
from sbp_boxing_nccl.nccl.nccl_group import NATIVE

DTYPES = {name: dtype for dtype, name in NATIVE.items()}

REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

#: Where a message goes: (communicator, sender, receiver, number), the ends as ranks of it.
Key = tuple[bytes, int, int, int]


@dataclass(frozen=True)
class Call:
    """What was called: on which communicator, how, with how many elements of what, to whom."""

    channel: str
    name: str
    count: int = 0
    dtype: str = ""
    peer: int = -1


class AbortedError(Exception):
    """The communicator was aborted."""


class Network(ABC):
    """Carries bytes between ranks of communicators."""

    @abstractmethod
    def join(self, unique_id: bytes, index: int) -> None:
        """Say that this rank is one of a communicator."""

    @abstractmethod
    def put(self, key: Key, data: bytes) -> Callable[[], bool]:
        """Send; returns a function that says whether it was received."""

    @abstractmethod
    def get(self, key: Key) -> bytes | None:
        """Receive, or return None if it has not come."""


class ThreadNetwork(Network):
    """Between threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[Key, bytes] = {}

    def join(self, unique_id: bytes, index: int) -> None:
        """All ranks have the data in common."""

    def put(self, key: Key, data: bytes) -> Callable[[], bool]:
        with self._lock:
            assert key not in self._data, "numbers are not used twice"
            self._data[key] = data
        return lambda: key not in self._data

    def get(self, key: Key) -> bytes | None:
        with self._lock:
            return self._data.pop(key, None)


def read(address: int, count: int, dtype: str) -> torch.Tensor:
    """The memory at an address, as a tensor."""
    size = count * DTYPES[dtype].itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[dtype])


class FakeEvent(StreamEvent):
    def __init__(self) -> None:
        self.come = threading.Event()

    def is_done(self) -> bool:
        return self.come.is_set()

    def hold_back(self) -> None:
        # The CPU has no stream to hold back: whatever comes next comes after.
        self.come.wait()


class FakeChannel(NcclChannel):
    """A communicator whose stream is a thread."""

    def __init__(self, device: FakeDevice, unique_id: bytes, size: int, index: int) -> None:
        self.name = device.name_of(unique_id)
        self.size = size
        self.index = index
        self.aborted = threading.Event()
        self.num_aborts = self.num_destroys = 0
        self.error: str | None = None
        self._device = device
        self._id = unique_id
        self._numbers: dict[tuple[str, int], int] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the stream, whatever it waits for."""
        self._work.put(None)
        self._thread.join(10.0)

    def wait_for(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._work.put(lambda: self._until(event.come.is_set))

    def all_reduce(self, sent: int, received: int, count: int, dtype: str, reduction: str) -> None:
        self._note("all_reduce", count, dtype)

        def work() -> None:
            parts = self._swap([read(sent, count, dtype)] * self.size, "all_reduce")
            read(received, count, dtype).copy_(reduced(parts, dtype, reduction))

        self._do(work)

    def reduce_scatter(
        self, sent: int, received: int, count: int, dtype: str, reduction: str
    ) -> None:
        self._note("reduce_scatter", count, dtype)

        def work() -> None:
            chunks = read(sent, count * self.size, dtype).chunk(self.size)
            parts = self._swap(list(chunks), "reduce_scatter")
            read(received, count, dtype).copy_(reduced(parts, dtype, reduction))

        self._do(work)

    def all_gather(self, sent: int, received: int, count: int, dtype: str) -> None:
        self._note("all_gather", count, dtype)

        def work() -> None:
            parts = self._swap([read(sent, count, dtype)] * self.size, "all_gather")
            whole = torch.cat([torch.frombuffer(part, dtype=DTYPES[dtype]) for part in parts])
            read(received, count * self.size, dtype).copy_(whole)

        self._do(work)

    def send(self, values: int, count: int, dtype: str, peer: int) -> None:
        self._note("send", count, dtype, peer)
        received: list[Callable[[], bool]] = []
        self._device.batch(
            self,
            lambda: received.append(self._put(peer, read(values, count, dtype), "message")),
            lambda: self._until(received[0]),
        )

    def receive(self, values: int, count: int, dtype: str, peer: int) -> None:
        self._note("receive", count, dtype, peer)

        def fill() -> None:
            data = self._get(peer, "message")
            assert len(data) == count * DTYPES[dtype].itemsize, "both ends say the same size"
            read(values, count, dtype).copy_(torch.frombuffer(data, dtype=DTYPES[dtype]))

        self._device.batch(self, fill)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self._work.put(event.come.set)
        return event

    def check(self) -> None:
        if self.error is not None and not self.aborted.is_set():
            raise RuntimeError(self.error)

    def abort(self) -> None:
        self.num_aborts += 1
        self._device.hold_abort.wait()
        self.aborted.set()

    def destroy(self) -> None:
        self.num_destroys += 1
        self.aborted.set()
        self._work.put(None)

    def _note(self, name: str, count: int, dtype: str, peer: int = -1) -> None:
        assert count > 0, "nothing is called to move nothing"
        self._device.calls.append(Call(self.name, name, count, dtype, peer))
        if name in self._device.keeps_host:
            if not self.aborted.wait(60.0):
                raise AssertionError("nobody aborted")
            raise RuntimeError("aborted by another thread")

    def _do(self, *steps: Callable[[], None]) -> None:
        self._device.batch(self, *steps)

    def start(self, steps: list[list[Callable[[], None]]]) -> None:
        """Run the first step of each call, then the second of each."""

        def work() -> None:
            rounds = [list(same) for same in itertools.zip_longest(*steps)]
            for same in rounds:
                # What sends first: then no call of a group waits for another one of it.
                for step in sorted(filter(None, same), key=lambda step: step.__name__ == "fill"):
                    step()

        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._device.lag_s)
            try:
                work()
            except AbortedError:
                continue
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.aborted.wait(0.0005) or self._device.ended.is_set():
                raise AbortedError

    def _number(self, direction: str, peer: int) -> int:
        number = self._numbers.get((direction, peer), 0)
        self._numbers[direction, peer] = number + 1
        return number

    def _put(self, peer: int, values: torch.Tensor, name: str) -> Callable[[], bool]:
        key = (self._id, self.index, peer, self._number("to", peer))
        data = name.encode() + b"|" + values.view(torch.uint8).numpy().tobytes()
        return self._device.network.put(key, data)

    def _get(self, peer: int, name: str) -> bytearray:
        key = (self._id, peer, self.index, self._number("from", peer))
        found: list[bytes] = []

        def come() -> bool:
            data = self._device.network.get(key)
            found.extend([] if data is None else [data])
            return bool(found)

        self._until(come)
        theirs, _, data = found[0].partition(b"|")
        assert theirs == name.encode(), f"one rank calls {theirs!r}, another {name!r}"
        return bytearray(data)

    def _swap(self, parts: list[torch.Tensor], name: str) -> list[bytearray]:
        """Send part i to rank i; return the parts for this one."""
        others = [rank for rank in range(self.size) if rank != self.index]
        for peer in others:
            self._put(peer, parts[peer], name)
        own = bytearray(parts[self.index].view(torch.uint8).numpy().tobytes())
        return [own if r == self.index else self._get(r, name) for r in range(self.size)]


def reduced(parts: list[bytearray], dtype: str, reduction: str) -> torch.Tensor:
    total = torch.frombuffer(parts[0], dtype=DTYPES[dtype]).clone()
    for part in parts[1:]:
        total = REDUCE[reduction](total, torch.frombuffer(part, dtype=DTYPES[dtype]))
    return total


class FakeDevice(NcclDevice):
    """A GPU that is the CPU.

    Attributes:
        calls: All that was called, in order.
        keeps_host: Names of calls that keep their caller until the channel is aborted.
        hang_init: Whether making a communicator never ends.
        hold_abort: An abort waits for this.
        lag_s: Seconds that streams let pass before each piece of work.
        id_error: Raised instead of making a unique id.
    """

    def __init__(
        self,
        network: Network,
        rank: int,
        *,
        bus_id: str | None = None,
        nccl_version: tuple[int, int, int] = (2, 28, 9),
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.host = "here"
        self.bus_id = f"0000:{rank:02X}:00.0" if bus_id is None else bus_id
        self.nccl_version = nccl_version
        self.network = network
        self.rank = rank
        self.calls: list[Call] = []
        self.channels: list[FakeChannel] = []
        self.keeps_host: set[str] = set()
        self.hang_init = False
        self.lag_s = 0.0
        self.hold_abort = threading.Event()
        self.hold_abort.set()
        self.id_error: Exception | None = None
        self.ended = threading.Event()
        self._ids = itertools.count()
        self._group = threading.local()

    def end(self) -> None:
        """End what a real NCCL would keep for ever, and all streams: the test is over."""
        self.ended.set()
        for channel in self.channels:
            channel.end()

    def name_of(self, unique_id: bytes) -> str:
        return unique_id.rstrip(b"\0").decode()

    def use(self) -> None:
        self._group.used = True

    def unique_id(self) -> bytes:
        if self.id_error is not None:
            raise self.id_error
        return f"{self.rank}.{next(self._ids)}".encode().ljust(128, b"\0")

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclChannel:
        if self.hang_init:
            self.ended.wait()
            raise AbortedError
        self.network.join(unique_id, index)
        channel = FakeChannel(self, unique_id, size, index)
        # As NCCL does, make sure that all ranks are there.
        channel._swap([torch.zeros(1)] * size, f"init {size}")
        self.channels.append(channel)
        return channel

    def record(self) -> FakeEvent:
        event = FakeEvent()
        event.come.set()
        return event

    def group_start(self) -> None:
        self.calls.append(Call("", "group_start"))
        assert self._open is None, "groups are not nested here"
        self._group.calls = []

    def group_end(self) -> None:
        self.calls.append(Call("", "group_end"))
        calls, self._group.calls = self._open, None
        assert calls is not None
        for channel in dict.fromkeys(channel for channel, _ in calls):
            channel.start([steps for owner, steps in calls if owner is channel])

    def batch(self, channel: FakeChannel, *steps: Callable[[], None]) -> None:
        """Start a call, now or when the group of this thread ends."""
        if self._open is None:
            channel.start([list(steps)])
        else:
            self._open.append((channel, list(steps)))

    @property
    def _open(self) -> Any:
        return getattr(self._group, "calls", None)
