"""The backend `mpi`: one rank in each process, over MPI.

The connections are `connections`, the steps `communicator`; this is the life of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp_boxing_nccl.communicator import MpiCommunicator
from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.connections import Connections
from sbp_boxing_nccl.library import load_mpi
from sbp_core.boxing.backend import BoxingBackend, Communicator
from sbp_core.errors import BoxingError


def build(config: MpiBoxingConfig) -> MpiBackend:
    """Make the backend of a config, not yet open."""
    return MpiBackend(config)


class MpiBackend(BoxingBackend):
    """Boxing over MPI, for tensors on CPUs.

    A step that fails breaks the backend: the calls that wait, here and on other ranks, and those
    that come raise `BoxingError`.

    Args:
        config: Settings.
        comm: mpi4py communicator whose processes are the ranks, in order; it is duplicated, and
            stays its owner's. `MPI.COMM_WORLD` if None.
    """

    def __init__(self, config: MpiBoxingConfig, *, comm: Any = None) -> None:
        self._config = config
        self._comm = comm
        self._connections: Connections | None = None
        self._communicator: MpiCommunicator | None = None
        self._closed = False

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`."""
        if self._closed or self._connections is not None:
            raise BoxingError("this boxing backend was opened before", todo="build a new one")
        mpi = load_mpi()
        comm = mpi.COMM_WORLD if self._comm is None else self._comm
        size = comm.Get_size()
        if sorted(ranks) != list(range(size)):
            raise BoxingError(
                f"the run has ranks {sorted(ranks)}, but MPI has started {size} processes",
                where=f"rank {comm.Get_rank()}",
                accepted=f"ranks 0 .. {size - 1}, one a process",
                todo=f"start the program with mpiexec -n {len(ranks)} python -m mpi4py ...",
            )
        self._connections = Connections(comm, mpi, self._config.connect_timeout_s)
        self._communicator = MpiCommunicator(self._connections)

    def local_ranks(self) -> tuple[int, ...]:
        """See `BoxingBackend.local_ranks`: the one rank of this process, once it is open."""
        return () if self._communicator is None else (self._communicator.rank,)

    def communicator(self, rank: int) -> Communicator:
        """See `BoxingBackend.communicator`.

        Raises:
            BoxingError: the rank is another process', or the backend is not open.
        """
        if self._communicator is None or rank != self._communicator.rank:
            raise BoxingError(
                f"rank {rank} does not live in this process",
                accepted=", ".join(map(str, self.local_ranks())) or "none: it is not open",
            )
        return self._communicator

    def fail(self, error: BaseException) -> None:
        """See `BoxingBackend.fail`; unblocks the ranks of other processes too."""
        if self._connections is not None:
            self._connections.fail(error)

    def close(self) -> None:
        """See `BoxingBackend.close`; waits a while for messages and ranks on their way."""
        self._closed = True
        if self._connections is not None:
            self._connections.close()
