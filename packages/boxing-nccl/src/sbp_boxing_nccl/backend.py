"""The backend `mpi`: one rank in each process, over MPI.

The connections are `connections`, the steps `communicator`; the life of both is
`sbp_core.boxing.processes.process`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sbp_boxing_nccl.board import MpiBoard
from sbp_boxing_nccl.communicator import MpiCommunicator
from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.connections import MpiConnections
from sbp_boxing_nccl.exit import Exit
from sbp_boxing_nccl.library import load_mpi
from sbp_boxing_nccl.start import processes
from sbp_core.boxing.processes.process import ProcessBackend
from sbp_core.boxing.supervision.start import Start
from sbp_core.errors import BoxingError


def build(config: MpiBoxingConfig) -> MpiBackend:
    """Make the backend of a config, not yet open."""
    return MpiBackend(config)


class MpiBackend(ProcessBackend):
    """Boxing over MPI, for tensors on CPUs.

    Args:
        config: Settings.
        comm: mpi4py communicator whose processes are the ranks, in order; it is duplicated, and
            stays its owner's. `MPI.COMM_WORLD` if None.
    """

    def __init__(self, config: MpiBoxingConfig, *, comm: Any = None) -> None:
        super().__init__()
        self._config = config
        self._comm = comm
        self._exit: Exit | None = None
        self._board: MpiBoard | None = None

    def starts(self, num_ranks: int, command: Sequence[str]) -> tuple[Start, ...]:
        """See `BoxingBackend.starts`: a launcher, `mpiexec`."""
        return processes(num_ranks, command)

    def close(self) -> None:
        """See `BoxingBackend.close`; if an exception is on its way, it fails the other ranks too.

        `SystemExit` is one, unless its status means success.
        """
        error = sys.exc_info()[1]
        quits = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not quits:
            self.fail(error)
        super().close()
        if self._exit is not None:
            self._exit.leave(well=self._board is not None and self._board.failure() is None)

    def _connect(self, ranks: Sequence[int]) -> tuple[MpiConnections, MpiCommunicator]:
        """See `ProcessBackend._connect`."""
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
        self._exit = Exit(comm, mpi)
        connections = MpiConnections(comm, mpi, self._config.connect_timeout_s)
        self._board = connections.board
        return connections, MpiCommunicator(connections)
