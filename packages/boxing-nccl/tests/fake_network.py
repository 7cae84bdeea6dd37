"""The network of fake GPUs whose ranks are processes of MPI."""

import threading
from collections.abc import Callable
from typing import Any

from fake_device import Key, Network
from mpi4py import MPI


class MpiNetwork(Network):
    """Between the processes of a communicator.

    Args:
        comm: Used for nothing else.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._data: dict[Key, bytes] = {}
        #: The process that each rank of each communicator of NCCL is.
        self._places: dict[tuple[bytes, int], int] = {}
        self._waiting: dict[Key, bytes] = {}
        self._sent: dict[Key, Any] = {}
        self._told: list[Any] = []

    def join(self, unique_id: bytes, index: int) -> None:
        with self._lock:
            for rank in range(self._comm.Get_size()):
                note = ("place", (unique_id, index), self._comm.Get_rank())
                self._told.append(self._comm.isend(note, rank))

    def put(self, key: Key, data: bytes) -> Callable[[], bool]:
        with self._lock:
            self._waiting[key] = data
            self._pump()
        return lambda: self._is_received(key)

    def get(self, key: Key) -> bytes | None:
        with self._lock:
            self._pump()
            return self._data.pop(key, None)

    def _is_received(self, key: Key) -> bool:
        with self._lock:
            self._pump()
            return key in self._sent and bool(self._sent[key].test()[0])

    def _pump(self) -> None:
        """Take in what has come, and send what has an address by now."""
        status = MPI.Status()
        while self._comm.iprobe(status=status):
            kind, key, value = self._comm.recv(source=status.Get_source())
            (self._places if kind == "place" else self._data)[key] = value
        for key in list(self._waiting):
            unique_id, _, receiver, _ = key
            if (unique_id, receiver) in self._places:
                note = ("data", key, self._waiting.pop(key))
                # Synchronous: it is over when the receiver has it.
                self._sent[key] = self._comm.issend(note, self._places[unique_id, receiver])
