"""The notes that ranks send each other: joining, waiting, failing, leaving.

A note is sent when something takes long or goes wrong, never on the fast path of a step. Holds no
tensors and knows no steps.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from sbp_core.boxing.call import wait_until

#: Pauses between two looks at what has come, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.005

#: Characters of an error that are told: short notes leave at once, whatever the receiver does.
_LONGEST_TEXT = 1000

#: Tag of all notes.
_TAG = 0


class Board:
    """The notes of one run, as one rank has received them.

    No method waits for another rank, but for `wait_for`.

    Args:
        comm: Communicator of all ranks, used for nothing else.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        self._mpi = mpi
        self._rank: int = comm.Get_rank()
        self._lock = threading.Lock()
        self._sent: list[Any] = []
        self._joined: set[tuple[str, int]] = set()
        self._waiting: dict[tuple[str, int], int] = {}
        self._left: set[int] = set()
        self._failure: str | None = None

    def join(self, group: str, ranks: Iterable[int]) -> None:
        """Tell the ranks of a group that this one is ready to connect it."""
        self._send(ranks, "join", group)

    def not_joined(self, group: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are not ready to connect a group."""
        self._take()
        return [rank for rank in ranks if (group, rank) not in self._joined]

    def wait_at(self, group: str, number: int, ranks: Iterable[int]) -> None:
        """Tell the ranks of a group that this one waits at a call, counted from the first."""
        self._send(ranks, "wait", group, number)

    def not_waiting(self, group: str, number: int, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not come to a call of a group, as far as they told."""
        self._take()
        return [
            rank
            for rank in ranks
            if rank != self._rank and self._waiting.get((group, rank), -1) < number
        ]

    def announce(self, text: str) -> None:
        """Tell all ranks why this one failed."""
        self._send(range(self._comm.Get_size()), "failure", text[:_LONGEST_TEXT])

    def failure(self) -> str | None:
        """Return what the first rank that failed said, or None if none did."""
        self._take()
        return self._failure

    def leave(self) -> None:
        """Tell all ranks that this one needs nobody any more."""
        self._send(range(self._comm.Get_size()), "leave")

    def all_left(self) -> bool:
        """Say whether nobody needs this rank any more, and all that it told has been heard."""
        return self.all_heard() and len(self._left) == self._comm.Get_size()

    def all_heard(self) -> bool:
        """Say whether MPI has delivered all that this rank told."""
        self._take()
        return not self._sent

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Look until `done()` says yes or `timeout_s` seconds are over; return the answer."""
        return wait_until(
            done, timeout_s, first_pause_s=_FIRST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S
        )

    def _send(self, ranks: Iterable[int], kind: str, *content: str | int) -> None:
        """Send a note to ranks; to oneself without MPI."""
        note = json.dumps([kind, *content]).encode()
        with self._lock:
            for rank in ranks:
                if rank == self._rank:
                    self._note(rank, kind, *content)
                else:
                    request = self._comm.Isend([note, self._mpi.BYTE], rank, _TAG)
                    self._sent.append((request, note))

    def _take(self) -> None:
        """Take in all notes that have come, and forget those that have gone."""
        with self._lock:
            status = self._mpi.Status()
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
                note = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([note, self._mpi.BYTE], status.Get_source(), _TAG)
                self._note(status.Get_source(), *json.loads(note))
            self._sent = [entry for entry in self._sent if not entry[0].Test()]

    def _note(self, rank: int, kind: str, *content: Any) -> None:
        if kind == "join":
            self._joined.add((content[0], rank))
        elif kind == "wait":
            self._waiting[content[0], rank] = content[1]
        elif kind == "leave":
            self._left.add(rank)
        elif self._failure is None and rank != self._rank:
            self._failure = f"rank {rank} reported: {content[0]}"
