"""The reaper: a script that ends all processes of a run, even if their supervisor was killed.

It finds processes by their groups. A launcher may give each rank a group of its own, so on Linux it
also looks for an environment variable, which children inherit. The supervisor
(`sbp_core.processes.supervise`) runs this file as a script, which waits until its standard input
says `done`. If the input ends before, the supervisor was killed, and the reaper ends its processes.
Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

#: Seconds between two looks at the remaining processes.
_PAUSE_S = 0.02

#: Seconds that the kernel has to end killed processes.
_KILL_S = 5.0

_PROC = Path("/proc")


def end_processes(groups: Collection[int], mark: str, term_s: float) -> None:
    """End all processes of some groups, and all with a mark: SIGTERM, then SIGKILL.

    Stopped processes are continued, so that they get the SIGTERM. Returns when no process remains,
    or when the kernel does not end killed ones (they wait for a device).

    Args:
        groups: Process groups.
        mark: Name of an environment variable that the processes have.
        term_s: Seconds between SIGTERM and SIGKILL.
    """
    _send(groups, mark, signal.SIGTERM, signal.SIGCONT)
    end = time.monotonic() + term_s
    while _left(groups, mark):
        if time.monotonic() >= end:
            break
        time.sleep(_PAUSE_S)
    end = time.monotonic() + _KILL_S
    while _left(groups, mark) and time.monotonic() < end:
        _send(groups, mark, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _send(groups: Collection[int], mark: str, *signals: int) -> None:
    """Send signals to the groups, and to marked processes outside of them."""
    for number in signals:
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        signal_ranks(groups, mark, number)


def signal_ranks(groups: Collection[int], mark: str, number: int) -> int:
    """Send a signal to the marked processes that are in none of some groups; return their number.

    Args:
        groups: The groups of launchers, whose ranks have groups of their own.
        mark: Name of an environment variable that the processes have.
        number: The number of the signal.
    """
    ranks = [process for process, group in _marked(mark) if group not in groups]
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
    return len(ranks)


def _left(groups: Collection[int], mark: str) -> bool:
    """Return whether a process remains; one that has ended as a zombie does not count."""
    if (_PROC / "self" / "stat").exists():
        return bool(_marked(mark)) or any(
            state != "Z" and group in groups for _, state, group in _processes()
        )
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
    return False


def _marked(mark: str) -> list[tuple[int, int]]:
    """Return (process, process group) of every marked process; empty without /proc.

    The environment of a process that has ended is empty.
    """
    return [
        (process, group)
        for process, state, group in _processes()
        if state != "Z" and mark in (environment_of(process) or ())
    ]


def _processes() -> list[tuple[int, str, int]]:
    """Return (process, state, process group) of every process; empty without /proc."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        if (fields := stat_of(int(folder.name))) is not None:
            found.append((int(folder.name), fields[0], int(fields[2])))
    return found


def stat_of(process: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name of the program, or None if there are none.

    The first of these fields is the state, a letter as `ps` shows it; then come its parent and its
    process group, and as number 19 its start time, in ticks since the start of its host.
    """
    try:
        text = (_PROC / str(process) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def environment_of(process: int) -> dict[str, str] | None:
    """Return the variables with which a process was started; None if they cannot be seen."""
    try:
        data = (_PROC / str(process) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in data.decode("utf-8", "replace").split("\0"))
    return {name: value for name, _, value in pairs}


def is_stopped(process: int, states: str = "Tt") -> bool:
    """Return whether a process was stopped by a signal; False if that cannot be seen.

    Args:
        process: Its id.
        states: `T` alone excludes processes that a debugger holds.
    """
    fields = stat_of(process)
    return fields is not None and fields[0] in states


def end_stopped(process: int, mark: str) -> None:
    """End a marked process that a signal has stopped; its launcher would wait for it first."""
    if is_stopped(process) and any(process == marked for marked, _ in _marked(mark)):
        with contextlib.suppress(OSError):  # it has ended by now
            os.kill(process, signal.SIGKILL)


def main(mark: str, term_s: float) -> None:
    """Read process groups, one a line, until `done`; if the input ends early, end the groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "done":
            return
        groups.add(int(line))
    end_processes(groups, mark, term_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
