"""The processes of the ranks of a run: host, process id, and whether they are still running.

`Member` is the process of a rank, as the rank publishes it. `Siblings` are the ranks that one
launcher has started on this host, before they are connected. A launcher does not treat a rank that
ends with status 0 as a failure, so the other ranks, which are not connected to it yet, would wait
until their deadline. But they can see that it has ended: all have one parent, and each has its rank
in its environment:

    torchrun            has ranks 0 and 1
      python train.py   RANK=0    waits for rank 1: does it exist?
      (ended)           RANK=1

This needs /proc, and does not work for ranks on other hosts, or for processes that were started by
hand one after the other. `failure_detector` uses this module.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from pathlib import Path

from sbp_core.errors import BoxingError
from sbp_core.processes.reaper import environment_of, stat_of

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

#: Evidence that `RANK` was not set by hand. Our own supervisor has all its ranks on this host.
_TORCHRUN, _SUPERVISED = "TORCHELASTIC_RUN_ID", "SBP_SUPERVISED_"

#: Seconds between two looks, and seconds without seeing a rank after which it counts as ended.
_LOOK_S, _ABSENT_S = 0.5, 1.0


class MemberState(StrEnum):
    """The state of a process, as far as this process can see it."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    ENDED = "ended"
    UNKNOWN = "unknown"


#: States of processes that do not run, by the letters of Linux. A traced process is halted by a
#: debugger.
_STATES = {"T": MemberState.STOPPED, "t": MemberState.TRACED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The process of one rank.

    Args:
        rank: Its rank.
        host: Name of its host.
        pid_namespace: Identifies the host, or container, in which the process id is valid.
        pid: Its process id.
        started: Its start time, in ticks since the start of its host; 0 if that is not known.
    """

    rank: int
    host: str
    pid_namespace: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, rank: int) -> Member:
        """Return this process, as a rank."""
        pid = os.getpid()
        try:
            # Equal for two processes that see each other's process ids.
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
        except OSError:
            namespace = ""
        host, (_, _, started) = socket.gethostname(), status_of(pid) or ("", 0, 0)
        return cls(rank=rank, host=host, pid_namespace=namespace, pid=pid, started=started)

    @classmethod
    def from_json(cls, text: str) -> Member:
        """Read the result of `to_json`."""
        names = (one.name for one in fields(cls))
        return cls(**dict(zip(names, json.loads(text), strict=True)))

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(astuple(self))

    def shares_pids_with(self, other: Member) -> bool:
        """Return whether both processes are in one namespace of process ids."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    def name_for(self, other: Member) -> str:
        """Return the name of this member in messages of another one."""
        place = "this host" if self.shares_pids_with(other) else f"host {self.host}"
        return f"rank {self.rank} (pid {self.pid} on {place})"


def state_of(member: Member, seen_from: Member) -> MemberState:
    """Return the state of a process: `UNKNOWN` if it is on another host.

    A process that ended and was not waited for (a zombie) counts as ended; so does a process whose
    id belongs to another process now.
    """
    if not member.shares_pids_with(seen_from):
        return MemberState.UNKNOWN
    status = status_of(member.pid)
    if status is not None:
        letter, _, started = status
        if letter in "ZXx" or (member.started and started != member.started):
            return MemberState.ENDED
        return _STATES.get(letter, MemberState.RUNNING)
    # Signal 0 does nothing, but fails if there is no process: for systems without /proc.
    try:
        os.kill(member.pid, 0)
    except ProcessLookupError:
        return MemberState.ENDED
    except PermissionError:  # it exists, and belongs to another user
        return MemberState.RUNNING
    except OSError:
        return MemberState.UNKNOWN
    return MemberState.RUNNING


def status_of(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent, start time in ticks) of a process; None if it is not found."""
    fields = stat_of(pid)
    return None if fields is None else (fields[0], int(fields[1]), int(fields[19]))


class Siblings:
    """The ranks on this host that this process can observe.

    Args:
        rank: The rank of this process.
        environment: Its variables when it started; None reads them from /proc.
    """

    def __init__(self, rank: int, environment: Mapping[str, str] | None = None) -> None:
        self._rank, self._variable = rank, ""
        #: The time at which a rank was first not seen, by rank.
        self._absent: dict[int, float] = {}
        self._next_look = 0.0
        found = (environment_of(os.getpid()) or {}) if environment is None else environment
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
                local_size, local_rank = size, self._rank  # our supervisor has all ranks here
            if local_size is None or local_rank is None or size is None:
                return ()
            if local_size == size:
                return tuple(range(size))
            # torchrun numbers the ranks of a host consecutively; `mpiexec --map-by` may not.
            first = self._rank - local_rank
            return tuple(range(first, first + local_size)) if self._variable == "RANK" else ()
        return ()

    def _find_launcher(self) -> int:
        """Return the process that started the ranks: the nearest non-rank ancestor; or 0."""
        pid = os.getpid()
        while (status := status_of(pid)) is not None:
            pid = status[1]
            found = environment_of(pid) if pid > 0 else None
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
        """Return the ranks that run; all ranks if the launcher has ended."""
        found = {self._rank}
        if status_of(self._launcher) is None:
            return {*self._ranks}
        for folder in _PROC.glob("[0-9]*"):
            status = status_of(int(folder.name))
            if status is None or status[0] in "ZX" or status[1] != self._launcher:
                continue
            text = (environment_of(int(folder.name)) or {}).get(self._variable, "")
            if text.isdecimal():
                found.add(int(text))
        return found

    @classmethod
    def check_before_waiting(cls) -> None:
        """Raise `BoxingError` if a rank has ended, before this rank waits where it cannot look."""
        found = environment_of(os.getpid()) or {}
        for variable, *_ in _LAUNCHERS:
            if not (text := found.get(variable, "")).isdecimal():
                continue
            siblings = cls(int(text), found)
            siblings.check()
            while siblings._absent:  # it may have ended, or not have begun
                time.sleep(_LOOK_S)
                siblings.check()

    def check(self) -> None:
        """Raise `BoxingError` if a rank has ended, because it will not come any more."""
        if ended := self.ended():
            raise did_not_open(self._rank, ended, f"ended before: ranks {_list(ended)}")


def did_not_open(rank: int, missing: list[int], why: str, waited: str = "") -> BoxingError:
    """Return the error of a rank that waits for others which do not open their backend.

    Args:
        rank: The rank that waits.
        missing: The ranks that have not come.
        why: What is known about them; or "".
        waited: How long it has waited, if the time is over.
    """
    return BoxingError(
        f"rank {rank} waited {waited}for ranks that did not open their boxing backend: "
        f"{_list(missing)}",
        where=why,
        todo="check that every process was started, and see the output of these ranks; a program "
        "that ends before the other ranks are done, also by sys.exit(0), ends the run",
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
