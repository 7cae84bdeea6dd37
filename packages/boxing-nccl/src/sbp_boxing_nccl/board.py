"""The notes that ranks send each other over MPI."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from sbp_core.boxing.processes import ControlStore, StoreLostError

#: Tag of all notes.
_TAG = 0

#: What the key of a rank's last note begins with. Between two ranks, notes come in order.
_END = "end/"


class MpiBoard(ControlStore):
    """Notes that are sent to whom they concern, who looks for them now and then.

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
        self._notes: dict[str, str] = {}
        self._ended = self._closed = False

    def all_heard(self) -> bool:
        """Say whether MPI has delivered all that this rank told."""
        self._take()
        return not self._sent

    def end(self) -> None:
        """Send the last note, to all ranks; what is put later stays here."""
        self._leave_note(f"{_END}{self.rank}", "1")

    def all_ended(self) -> bool:
        """Say whether no note of any rank, nor for any, is on its way any more.

        The communicator may be freed then, and not before: MPI gives its number to the next one,
        which would take a late note for a message of its own.
        """
        came = self._are_there(f"{_END}{rank}" for rank in range(self.size))
        return came and not self._sent

    def close(self) -> None:
        """Let go of the communicator; nothing may be asked any more."""
        with self._lock:
            self._closed = True

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        note = json.dumps([key, value]).encode()
        with self._lock:
            self._keep(key, value)
            is_silent = self._ended or self._closed
            self._ended = self._ended or key.startswith(_END)
            for rank in () if is_silent else ranks:
                if rank != self.rank:
                    try:
                        request = self._comm.Isend([note, self._mpi.BYTE], rank, _TAG)
                    except RuntimeError as error:
                        raise StoreLostError(f"MPI reported: {error}") from error
                    self._sent.append((request, note))

    def _get(self, key: str) -> str | None:
        self._take()
        return self._notes.get(key)

    def _has_all(self, keys: Iterable[str]) -> bool:
        self._take()
        return all(key in self._notes for key in keys)

    def _take(self) -> None:
        """Take in all notes that have come, and forget those that have gone."""
        with self._lock:
            if self._closed:
                return
            try:
                status = self._mpi.Status()
                while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
                    note = bytearray(status.Get_count(self._mpi.BYTE))
                    self._comm.Recv([note, self._mpi.BYTE], status.Get_source(), _TAG)
                    self._keep(*json.loads(note))
                self._sent = [entry for entry in self._sent if not entry[0].Test()]
            except RuntimeError as error:
                raise StoreLostError(f"MPI reported: {error}") from error

    def _keep(self, key: str, value: str) -> None:
        if key == "failure":
            self._notes.setdefault(key, value)
        else:
            self._notes[key] = value
