"""An MPI for tests, all of whose ranks live in one thread: messages arrive when a test says so."""

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


def fromaddress(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else BLANK


BLANK = memoryview(bytearray())

#: Stands in for `mpi4py.MPI`.
MPI: Any = SimpleNamespace(BYTE="byte", buffer=SimpleNamespace(fromaddress=fromaddress))


@dataclass
class Request:
    """A message at one of its ends; over when it was delivered, and never before."""

    buffer: memoryview
    is_over: bool = False

    @property
    def place(self) -> range:
        """The addresses of the buffer."""
        if not self.buffer:
            return range(0)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        return range(start, start + len(self.buffer))

    def Test(self) -> bool:  # noqa: N802 (mpi4py's name)
        return self.is_over


@dataclass
class Network:
    """What is on its way between the ranks; matched in order, delivered in any order."""

    size: int
    sent: dict[tuple[int, int, int], list[Request]] = field(default_factory=dict)
    awaited: dict[tuple[int, int, int], list[Request]] = field(default_factory=dict)
    under_way: list[tuple[str, Request]] = field(default_factory=list)
    matched: list[tuple[Request, Request]] = field(default_factory=list)

    def post(self, side: str, key: tuple[int, int, int], buffer: memoryview) -> Request:
        request = Request(buffer)
        self._check(side, request)
        getattr(self, side).setdefault(key, []).append(request)
        if self.sent.get(key) and self.awaited.get(key):
            self.matched.append((self.sent[key].pop(0), self.awaited[key].pop(0)))
        return request

    def _check(self, side: str, request: Request) -> None:
        """Hold MPI's rule: what is being sent is not written to, what is received not used."""
        self.under_way = [(of, other) for of, other in self.under_way if not other.is_over]
        for of, other in self.under_way:
            if "awaited" in (of, side):
                common = range(
                    max(request.place.start, other.place.start),
                    min(request.place.stop, other.place.stop),
                )
                assert not common, f"{side} where something is {of}"
        self.under_way.append((side, request))

    def deliver(self, index: int) -> None:
        """Copy one message, from the memory that was sent as it is now."""
        sent, awaited = self.matched.pop(index)
        awaited.buffer[:] = sent.buffer
        sent.is_over = awaited.is_over = True


@dataclass
class Comm:
    """The network as one rank sees it."""

    network: Network
    rank: int

    def Get_rank(self) -> int:  # noqa: N802 (mpi4py's name)
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 (mpi4py's name)
        return self.network.size

    def Isend(self, given: Any, peer: int, tag: int) -> Request:  # noqa: N802 (mpi4py's name)
        return self.network.post("sent", (self.rank, peer, tag), given[0])

    def Issend(self, given: Any, peer: int, tag: int) -> Request:  # noqa: N802 (mpi4py's name)
        return self.Isend(given, peer, tag)  # which is over when it is received, here

    def Irecv(self, given: Any, peer: int, tag: int) -> Request:  # noqa: N802 (mpi4py's name)
        return self.network.post("awaited", (peer, self.rank, tag), given[0])
