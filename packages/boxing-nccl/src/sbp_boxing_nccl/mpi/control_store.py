"""`MpiControlStore`: a key-value store to connect ranks and report failures, over MPI.

MPI has no store that all ranks could read. So the writer of an entry sends it to the ranks that
need it. These receive all pending entries whenever they read something, and keep copies.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from sbp_core.processes import FIRST_STAYS, ControlStore, StoreLostError

#: Tag of all entries.
_TAG = 0

#: Key of a rank's last entry. Between two ranks, entries come in order.
_END = "end"


class MpiControlStore(ControlStore):
    """A control store whose entries are sent to the ranks that need them.

    Args:
        comm: Communicator of all ranks, used for nothing else.
        mpi: The module `mpi4py.MPI`.
    """

    pauses_s: ClassVar[tuple[float, float]] = (1e-4, 0.005)

    def __init__(self, comm: Any, mpi: Any) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._mpi = mpi
        self._lock = threading.Lock()
        self._sent: list[Any] = []
        self._entries: dict[str, str] = {}
        self._ended = self._closed = False

    def all_delivered(self) -> bool:
        """Return whether MPI has delivered all entries of this rank."""
        self._receive()
        return not self._sent

    def end(self) -> None:
        """Send the last entry, to all ranks; later entries stay local."""
        self.say(_END)

    def all_ended(self) -> bool:
        """Return whether no entry to or from any rank is in flight.

        Only then the communicator may be freed: MPI reuses its number for the next communicator,
        which would mistake a late entry for one of its messages.
        """
        return self.all_announced(_END) and not self._sent

    def close(self) -> None:
        """Stop using the communicator; the store must not be used afterwards."""
        with self._lock:
            self._closed = True

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        message = json.dumps([key, value]).encode()
        with self._lock:
            self._keep(key, value)
            is_silent = self._ended or self._closed
            self._ended = self._ended or key == f"{_END}/{self.rank}"
            for rank in () if is_silent else ranks:
                if rank != self.rank:
                    try:
                        request = self._comm.Isend([message, self._mpi.BYTE], rank, _TAG)
                    except RuntimeError as error:
                        raise StoreLostError(f"MPI reported: {error}") from error
                    self._sent.append((request, message))

    def _get(self, key: str) -> str | None:
        self._receive()
        return self._entries.get(key)

    def _delete(self, key: str) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def _has_all(self, keys: Iterable[str]) -> bool:
        self._receive()
        return all(key in self._entries for key in keys)

    def _receive(self) -> None:
        """Receive all entries that have arrived, and drop the requests of delivered ones."""
        with self._lock:
            if self._closed:
                return
            try:
                status = self._mpi.Status()
                while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
                    message = bytearray(status.Get_count(self._mpi.BYTE))
                    self._comm.Recv([message, self._mpi.BYTE], status.Get_source(), _TAG)
                    self._keep(*json.loads(message))
                self._sent = [entry for entry in self._sent if not entry[0].Test()]
            except RuntimeError as error:
                raise StoreLostError(f"MPI reported: {error}") from error

    def _keep(self, key: str, value: str) -> None:
        if key in FIRST_STAYS:
            self._entries.setdefault(key, value)
        else:
            self._entries[key] = value
