"""The processes of a run: where each rank lives, and whether it still runs.

What ranks tell each other is `control_store`; who looks, and when, is `failure_detector`.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path

_PROC = Path("/proc")


class MemberState(StrEnum):
    """What a process does, as far as it can be seen from here."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    ENDED = "ended"
    UNKNOWN = "unknown"


#: What processes do that do not run, by the letters of Linux. A debugger holds them for as long as
#: somebody looks at them.
_STATES = {"T": MemberState.STOPPED, "t": MemberState.TRACED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The process of one rank.

    Args:
        rank: Its rank.
        host: Name of its host.
        pid_namespace: What tells apart hosts, and containers, whose process ids mean nothing to
            each other.
        pid: Its process id.
        started: When it started, in ticks since its host did; 0 if that is not known.
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
        host, (_, _, started) = socket.gethostname(), status_of(pid) or ("", 0, 0)
        return cls(rank=rank, host=host, pid_namespace=_pid_namespace(), pid=pid, started=started)

    @classmethod
    def from_json(cls, text: str) -> Member:
        """Read what `to_json` wrote."""
        rank, host, pid_namespace, pid, started = json.loads(text)
        return cls(rank=rank, host=host, pid_namespace=pid_namespace, pid=pid, started=started)

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(astuple(self))

    def shares_pids_with(self, other: Member) -> bool:
        """Say whether process ids of one mean something to the other."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    def name_for(self, other: Member) -> str:
        """Return how a message of another member calls it."""
        place = "this host" if self.shares_pids_with(other) else f"host {self.host}"
        return f"rank {self.rank} (pid {self.pid} on {place})"


def state_of(member: Member, seen_from: Member) -> MemberState:
    """Return what a process does: `UNKNOWN` if it lives on another host.

    A process that ended and was not waited for (a zombie) has ended, and so has one whose process
    id another process has now.
    """
    if not member.shares_pids_with(seen_from):
        return MemberState.UNKNOWN
    status = status_of(member.pid)
    if status is None:
        return _signalled(member.pid)
    letter, _, started = status
    if letter in "ZXx" or (member.started and started != member.started):
        return MemberState.ENDED
    return _STATES.get(letter, MemberState.RUNNING)


def status_of(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent, start time in ticks) of a process; None if it is not seen."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
        # The name of the program, in parentheses, may itself hold spaces and parentheses.
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[1]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _signalled(pid: int) -> MemberState:
    """Return what a signal that does nothing finds out: what remains where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return MemberState.ENDED
    except PermissionError:  # it is another user's, so there is one
        return MemberState.RUNNING
    except OSError:
        return MemberState.UNKNOWN
    return MemberState.RUNNING


def _pid_namespace() -> str:
    """Return what is equal for two processes that see each other's process ids."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""
