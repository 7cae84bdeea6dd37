"""The ranks that one launcher has started on this host, before they are connected.

A launcher takes a rank that ends with status 0 for no failure, and the other ranks, which are not
connected to it yet, would wait until their deadline. But they can see that it has ended: all are
processes of one parent, and the environment of each says which rank it is:

    torchrun            has ranks 0 and 1
      python train.py   RANK=0    waits for rank 1: is it there?
      (ended)           RANK=1

Nothing is known without /proc, of ranks on other hosts, and of processes that were started by hand,
one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from sbp_core.boxing.processes.membership import status_of
from sbp_core.errors import BoxingError

_PROC = Path("/proc")

#: Variables of launchers that start all ranks of a host at once: the rank, the number of ranks, the
#: number of ranks on the host, and the rank among these.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)

#: What shows that `RANK` was not set by hand. Our own supervisor has all its ranks on this host.
_TORCHRUN, _SUPERVISED = "TORCHELASTIC_RUN_ID", "SBP_SUPERVISED_"

#: Seconds between two looks, and for which a rank is not seen until it counts as ended.
_LOOK_S, _ABSENT_S = 0.5, 1.0


class Siblings:
    """The ranks of this host, as far as they can be seen.

    Args:
        rank: Of this process.
        environment: Its variables when it started; None reads them from /proc.
    """

    def __init__(self, rank: int, environment: Mapping[str, str] | None = None) -> None:
        self._rank, self._variable = rank, ""
        self._ranks: tuple[int, ...] = ()
        #: When a rank was first not seen, by rank.
        self._absent: dict[int, float] = {}
        self._next_look = 0.0
        found = (_environment(os.getpid()) or {}) if environment is None else environment
        self._ranks = self._of_this_host(found)
        self._launcher = self._find_launcher() if len(self._ranks) > 1 else 0

    def _of_this_host(self, found: Mapping[str, str]) -> tuple[int, ...]:
        is_supervised = any(name.startswith(_SUPERVISED) for name in found)
        for names in _LAUNCHERS:
            self._variable, *others = names
            if found.get(self._variable) != str(self._rank):
                continue
            if self._variable == "RANK" and not found.get(_TORCHRUN) and not is_supervised:
                continue
            size, local_size, local_rank = (
                int(text) if (text := found.get(name, "")).isdecimal() else None for name in others
            )
            if self._variable == "RANK" and not found.get(_TORCHRUN):
                local_size, local_rank = size, self._rank  # our supervisor's are all here
            if local_size is None or local_rank is None or size is None:
                return ()
            if local_size == size:
                return tuple(range(size))
            # torchrun numbers the ranks of a host one after the other; `mpiexec --map-by` may not.
            first = self._rank - local_rank
            return tuple(range(first, first + local_size)) if self._variable == "RANK" else ()
        return ()

    def _find_launcher(self) -> int:
        """Return the process that has started the ranks: the first above that is none; or 0."""
        pid = os.getpid()
        while (status := status_of(pid)) is not None:
            pid = status[1]
            found = _environment(pid) if pid > 0 else None
            if found is None:
                return 0
            if found.get(self._variable) != str(self._rank):
                return pid
        return 0

    def ended(self) -> list[int]:
        """Return the ranks that have ended."""
        now = time.monotonic()
        if self._launcher and now >= self._next_look:
            self._next_look = now + _LOOK_S
            here = self._seen()
            self._absent = {
                rank: self._absent.get(rank, now) for rank in self._ranks if rank not in here
            }
        return [rank for rank, since in self._absent.items() if now - since >= _ABSENT_S]

    def _seen(self) -> set[int]:
        """Return the ranks that run; all of them if the launcher has ended."""
        found = {self._rank}
        if status_of(self._launcher) is None:
            return {*self._ranks}
        for folder in _PROC.glob("[0-9]*"):
            status = status_of(int(folder.name))
            if status is None or status[0] in "ZX" or status[1] != self._launcher:
                continue
            text = (_environment(int(folder.name)) or {}).get(self._variable, "")
            if text.isdecimal():
                found.add(int(text))
        return found

    @classmethod
    def check_before_waiting(cls) -> None:
        """Raise `BoxingError` if a rank has ended, before this one waits where it cannot look."""
        found = _environment(os.getpid()) or {}
        for variable, *_ in _LAUNCHERS:
            if not (text := found.get(variable, "")).isdecimal():
                continue
            siblings = cls(int(text), found)
            siblings.check()
            while siblings._absent:  # it may have ended, or not have begun
                time.sleep(_LOOK_S)
                siblings.check()

    def check(self) -> None:
        """Raise `BoxingError` if a rank has ended: it will not come any more."""
        if ended := self.ended():
            raise did_not_open(self._rank, ended, f"ended before: ranks {_list(ended)}")


def did_not_open(rank: int, missing: list[int], why: str, waited: str = "") -> BoxingError:
    """Return the error of a rank that waits for others which do not open their backend.

    Args:
        rank: That waits.
        missing: Those that have not come.
        why: What is known of them; or "".
        waited: How long it has waited, if that is why it waits no longer.
    """
    return BoxingError(
        f"rank {rank} waited {waited}for ranks that did not open their boxing backend: "
        f"{_list(missing)}",
        where=why,
        todo="check that every process was started, and see why those did not come: a program that "
        "ends before the others are through, also by sys.exit(0), ends the run",
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _environment(pid: int) -> dict[str, str] | None:
    """Return the variables with which a process was started; None if they cannot be seen."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in data.decode("utf-8", "replace").split("\0"))
    return {name: value for name, _, value in pairs}
