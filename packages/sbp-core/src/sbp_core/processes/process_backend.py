"""Base class of boxing backends with one rank in each process: opening, failing and closing.

A subclass, as in boxing-torch and boxing-nccl, implements how the processes find each other, and
the transport of the data. Boxing is communication that changes how a tensor is distributed.
"""

from __future__ import annotations

import atexit
import os
import sys
from abc import abstractmethod
from collections.abc import Sequence

from sbp_core.boxing.backend import BoxingBackend, Communicator
from sbp_core.errors import BoxingError
from sbp_core.processes.connections import Connections
from sbp_core.processes.survivors import Survivors


def check_ranks(
    ranks: Sequence[int],
    rank: int,
    num_processes: int,
    *,
    todo: str = "start as many processes as the mesh has ranks",
) -> None:
    """Check that the ranks of a run are the processes that were started.

    Args:
        ranks: The ranks of the run.
        rank: The rank of this process.
        num_processes: The number of processes; each has one rank.
        todo: The advice on how to start enough processes.

    Raises:
        BoxingError: they are not.
    """
    if sorted(ranks) != list(range(num_processes)):
        raise BoxingError(
            f"the run has ranks {sorted(ranks)}, but {num_processes} processes were started",
            where=f"rank {rank}",
            accepted=f"ranks 0 .. {num_processes - 1}, one a process",
            todo=todo,
        )


class ProcessBackend(BoxingBackend):
    """A boxing backend with one rank in each process.

    A failed step breaks the backend: pending and later calls, on all ranks, raise `BoxingError`.
    """

    def __init__(self) -> None:
        self._connections: Connections | None = None
        self._communicator: Communicator | None = None
        self._closed = False
        self._process = 0

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`."""
        if self._closed or self._connections is not None:
            raise BoxingError("this boxing backend was opened before", todo="build a new one")
        self._connections, self._communicator = self._connect(ranks)
        self._process = os.getpid()
        # Other ranks need a report if the program ends without closing; and no thread of ours may
        # run while the interpreter shuts down.
        atexit.register(self._end_with_program)

    def local_ranks(self) -> tuple[int, ...]:
        """See `BoxingBackend.local_ranks`: the one rank of this process, once it is open."""
        return () if self._communicator is None else (self._communicator.rank,)

    def communicator(self, rank: int) -> Communicator:
        """See `BoxingBackend.communicator`.

        Raises:
            BoxingError: the rank is in another process, or the backend is not open.
        """
        if self._communicator is None or rank != self._communicator.rank:
            raise BoxingError(
                f"rank {rank} does not run in this process",
                accepted=", ".join(map(str, self.local_ranks())) or "none: it is not open",
            )
        return self._communicator

    def fail(self, error: BaseException) -> None:
        """See `BoxingBackend.fail`; unblocks the ranks of other processes too."""
        if self._connections is not None:
            self._connections.fail(error)

    def failure_reason(self) -> str:
        """See `BoxingBackend.failure_reason`."""
        return "" if self._connections is None else self._connections.known_failure()

    def survivors(self, limit_s: float) -> Survivors:
        """See `BoxingBackend.survivors`."""
        if self._connections is None:
            raise BoxingError("this boxing backend is not open")
        return self._connections.survivors(limit_s)

    def close(self) -> None:
        """See `BoxingBackend.close`; waits a while for messages in transit and for slower ranks.

        Raises:
            BoxingError: a rank ended, or hangs, without having closed its backend.
        """
        self._closed = True
        atexit.unregister(self._end_with_program)
        if self._connections is not None:
            self._connections.close()

    def _end_with_program(self) -> None:
        """Report to the other ranks that the program ends without having closed the backend."""
        if self._closed or self._connections is None or os.getpid() != self._process:
            return  # a forked child of this process is not a rank
        # The exception that the interpreter has just printed, if one ended the program.
        error = getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            error = BoxingError("its program ended without closing the boxing backend")
        self._connections.end_with_program(error)

    @abstractmethod
    def _connect(self, ranks: Sequence[int]) -> tuple[Connections, Communicator]:
        """Connect this process to the others, and make the communicator of its rank.

        Args:
            ranks: All ranks of the run; not checked yet.

        Raises:
            BoxingError: they are not the processes that were started, or cannot be connected.
        """
