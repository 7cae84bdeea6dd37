"""Send the run from rank 0 to the other ranks that torchrun, mpiexec or srun have started.

Rank 0 parses the command line, creates the run folder, and writes the settings there. The other
ranks wait for the path:

    rank 0    compose, check, RUN/config.yaml ... broadcast(RUN) ... train ... broadcast(None)
    others    receive() ...............................-> RUN         train ... receive() -> None

A sweep has several runs, and goes on after a failed run. If the command line is wrong, or only asks
for help, there is no run. The transport is MPI under mpiexec, else a store of torch.distributed.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sbp_core.errors import ConfigError, RunError, SbpError
from sbp_core.processes import Siblings
from sbp_launch.exit_codes import BAD_CONFIG
from sbp_launch.world import MPIEXEC, World

#: Timeout in seconds for connecting to the store of rank 0, or of torchrun.
_CONNECT_S = 300.0

#: Seconds that a rank waits at its end for other ranks: under MPI a rank that has failed; with a
#: store rank 0, which may hold the store, if it has not failed.
_LEAVE_S, _LEAVE_STORE_S = 3.0, 30.0

#: Seconds between two polls.
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """A message of rank 0 to the other ranks.

    Args:
        folder: Folder of the next run; None if there is no further run.
        code: Exit code of rank 0, if there is no further run.
        of_sweep: Whether further runs follow if this one fails.
    """

    folder: Path | None = None
    code: int = 0
    of_sweep: bool = False


class Rendezvous(ABC):
    """Connection between the processes of a run before the run begins."""

    def broadcast(self, told: RunOrder) -> None:
        """Send an order from rank 0 to all other ranks."""
        self._send(json.dumps(asdict(told), default=str))

    def receive(self) -> RunOrder:
        """Return the next order of rank 0.

        Raises:
            RunError: rank 0 has ended without an order.
        """
        told = json.loads(self._receive())
        folder = told.pop("folder")
        return RunOrder(folder=None if folder is None else Path(folder), **told)

    @abstractmethod
    def leave(self, code: int) -> None:
        """Prepare for the end of this process; all processes call this last.

        Args:
            code: Its exit code. If it is not 0, the launcher ends processes that do not end.
        """

    @abstractmethod
    def _send(self, text: str) -> None:
        """Send a text from rank 0 to all other ranks."""

    @abstractmethod
    def _receive(self) -> str:
        """Return the next text of rank 0."""


def connect(world: World) -> Rendezvous:
    """Connect this process to the other processes; all of them call this.

    Raises:
        ConfigError: the library or the address for connecting is missing.
        RunError: the other processes cannot be reached.
    """
    return _MpiMeeting(world) if world.launcher == MPIEXEC else _StoreMeeting(world)


class _MpiMeeting(Rendezvous):
    """Rendezvous over `MPI.COMM_WORLD`; it also provides the address for torch.distributed."""

    def __init__(self, world: World) -> None:
        try:
            self._mpi: Any = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"mpiexec has started {world.size} processes, but they cannot connect through MPI: "
                f"{error}",
                where=f"rank {world.rank}",
                todo='pip install "sbp-boxing-nccl[mpi]", and the MPI library of this mpiexec',
            ) from error
        self._comm = self._mpi.COMM_WORLD
        if self._comm.Get_size() != world.size:
            raise ConfigError(
                f"mpiexec says there are {world.size} processes, and mpi4py sees "
                f"{self._comm.Get_size()}",
                where=f"rank {world.rank}: {self._mpi.Get_library_version().strip()}",
                todo="start with the mpiexec of the MPI library that mpi4py uses",
            )

    def leave(self, code: int) -> None:
        """See `Rendezvous.leave`: MPI waits at the end of a process for all others."""
        if not code:
            return
        request, end = self._comm.Ibarrier(), time.monotonic() + _LEAVE_S
        while not request.Test():
            if time.monotonic() >= end:
                self._comm.Abort(code)
            time.sleep(_LOOK_S)

    def _send(self, text: str) -> None:
        self._comm.bcast(text, root=0)

    def _receive(self) -> str:
        text: str = self._comm.bcast(None, root=0)
        return text


class _StoreMeeting(Rendezvous):
    """Rendezvous over a store of torch.distributed: torchrun's own, or a store of rank 0."""

    def __init__(self, world: World) -> None:
        from torch import distributed

        from sbp_torch.boxing.processes import naming_rendezvous, store_at

        dist: Any = distributed
        self._world = world
        place = "env://", world.rank, world.size
        with naming_rendezvous(*place):
            store = store_at(*place, timedelta(seconds=_CONNECT_S))
        # torchrun keeps its store when it restarts the ranks.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"sbp-train/{attempt}", store)
        self._told, self._siblings = 0, Siblings(world.rank)

    def leave(self, code: int) -> None:
        """See `Rendezvous.leave`: rank 0, which may hold the store, ends last.

        Not after a failure: other ranks may be busy then, and most launchers end them.
        """
        if code not in (0, BAD_CONFIG):
            return
        with suppress(RuntimeError):  # of torch: another rank has not ended in time, or is gone
            if self._world.rank:
                self._store.set(f"rank {self._world.rank} leaves", "")
            else:
                others = [f"rank {rank} leaves" for rank in range(1, self._world.size)]
                self._store.wait(others, timedelta(seconds=_LEAVE_STORE_S))

    def _send(self, text: str) -> None:
        self._store.set(str(self._told), text)
        self._told += 1

    def _receive(self) -> str:
        key = str(self._told)
        try:
            while not self._store.check([key]):
                if 0 in self._siblings.ended():  # seen where torchrun has the store
                    raise _without_a_word("it has ended")
                time.sleep(_LOOK_S)
            text: bytes = self._store.get(key)
        except SbpError:
            raise
        except RuntimeError as error:  # of torch: the connection is gone
            raise _without_a_word(str(error).partition("\n")[0]) from None
        self._told += 1
        return text.decode()


def _without_a_word(why: str) -> RunError:
    return RunError(
        f"rank 0 has ended without reporting an error: {why}",
        todo="read the end of its output; a program that calls sys.exit ends the run",
    )
