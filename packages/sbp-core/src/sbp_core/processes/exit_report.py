"""Reports of how the processes of a run ended, as values and as error messages for users.

The first process that ends is not always the cause. A launcher such as `mpiexec` ends as one
process, whose exit code names no rank; and a rank that waited for the failed rank may end first.
But the remaining ranks report for which rank they waited (`boxing.collective_call`), and the
launcher itself often reports which process it lost (`LaunchSpec.failure_patterns`).
`RootCauseFinder` reads these lines.
"""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.errors import RunError

#: Descriptions of a rank that does nothing any more, in the errors of other ranks.
STOPPED, SILENT = "is stopped by a signal", "gives no sign of life"

#: Reports of ranks about other ranks, the most certain first. A missing rank may itself have waited
#: for a rank that hangs, so a hanging rank precedes a missing one. `.*` is greedy: if rank 2
#: repeats a report of rank 1, the last name in the line is the cause.
_STILL = re.compile(rf"rank (?P<rank>\d+) \([^()]*\):? (?:{STOPPED}|{SILENT})")
#: The same for a rank that a signal has stopped, on the host of the reporting rank.
STOPPED_HERE = re.compile(rf"rank \d+ \(pid (?P<process>\d+) on this host\):? {STOPPED}")
_MISSED = re.compile(r"ranks that did not (?:arrive|open their boxing backend): (?P<rank>\d+)")
_FAILED = re.compile(r".*could not complete: (?=rank (?P<rank>\d+) (?:reported:|\(pid))")
#: The error of ranks that wait for a rank which cannot write its part of a checkpoint. A warning
#: ends no rank: a later checkpoint replaces the missing one.
_NOT_WRITTEN = re.compile(r"(?!WARNING ).*cannot be written: (?=rank (?P<rank>\d+) says:)")

#: Characters of a line that are quoted.
_LONGEST = 200

#: Exit status of a run that took too long, as for the command `timeout`.
TIMED_OUT = 124

_TODO = {
    "SIGKILL": "nothing can catch SIGKILL: see the kernel's log (`dmesg`) for lack of memory, or "
    "ask who sent it",
    "SIGTERM": "something outside of the run ended it; ask the scheduler, or who sent it",
}

_STOPPED_TODO = "see what stopped it: a debugger, or a batch system that suspends jobs"


class RootCauseFinder:
    """Looks for the name of the rank that failed first in the output lines of one process.

    Args:
        spec: The process; if it is a single rank, it can only name another rank.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        is_rank = len(spec.ranks) == 1
        self._patterns = [] if is_rank else [re.compile(text) for text in spec.failure_patterns]
        self._own = str(spec.ranks[0]) if is_rank else ""
        #: The rank and the words that name it, by kind of sentence, the most certain first.
        self._found: dict[int, tuple[str, str]] = {}

    def read(self, line: str) -> None:
        """Read a line; for each kind of sentence the first line counts."""
        if still := _STILL.search(line):
            self._note(0, still["rank"], still[0])
        if missed := _MISSED.search(line):
            self._note(1, missed["rank"], line[missed.start() :])
        elif failed := _FAILED.match(line):
            self._note(1, failed["rank"], line[failed.end() :])
        if not_written := _NOT_WRITTEN.match(line):
            self._note(2, not_written["rank"], line[not_written.end() :])
        for kind, pattern in enumerate(self._patterns, start=3):
            if lost := pattern.search(line):
                self._note(kind, lost["rank"], line.strip())

    def _note(self, kind: int, rank: str, words: str) -> None:
        if rank != self._own:
            self._found.setdefault(kind, (rank, words[:_LONGEST]))

    @property
    def found(self) -> tuple[str, str] | None:
        """The rank and the words that name it, or None; ranks' reports precede a launcher's."""
        return self._found[min(self._found)] if self._found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How one process ended, or its condition when the supervisor had to end it.

    Args:
        spec: The specification by which it was started.
        pid: Its process id.
        code: Its exit code, minus the number of the signal that ended it, or None if it had not
            ended by itself.
        after_s: Seconds from the start of the run.
        stopped: Whether it had not ended because a signal had stopped it.
        last_lines: The last lines that it wrote.
        root_cause: The rank that failed first, and the words that name it, if its output names one;
            the output of a process that is one rank names another rank.
    """

    spec: LaunchSpec
    pid: int
    code: int | None
    after_s: float
    stopped: bool = False
    last_lines: tuple[str, ...] = ()
    root_cause: tuple[str, str] | None = None

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended it, such as `SIGKILL`, or `""`."""
        if self.code is None or self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def place(self, *, quote: bool) -> str:
        """Return where it ran, and its last lines if `quote`."""
        place = f"{self.spec.name}: host {socket.gethostname()}, process {self.pid}"
        if not quote:
            return place
        lines = [f"    {line}" for line in self.last_lines]
        return "\n".join([f"{place}; it said {'last:' if lines else 'nothing'}", *lines])

    @property
    def how(self) -> str:
        """How it ended, as words that follow its name."""
        if self.code is None:
            return "had been stopped by a signal" if self.stopped else "was still running"
        if self.code < 0:
            return f"was ended by {self.signal_name}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How the processes of a run ended.

    Args:
        exits: The processes that ended by themselves, in this order.
        remaining: The processes that the supervisor ended, in their condition before that.
        timeout_s: The time limit of the run, if it was exceeded.
        stopped_by: Number of the signal that asked all processes to end, if there was one.
    """

    exits: tuple[ProcessExit, ...]
    remaining: tuple[ProcessExit, ...] = ()
    timeout_s: float | None = None
    stopped_by: int | None = None

    @property
    def first(self) -> ProcessExit | None:
        """The process that was the first to end badly, if there is one."""
        return next((end for end in self.exits if end.code != 0), None)

    @property
    def cause(self) -> ProcessExit | None:
        """The process that failed first: `first`, or the rank for which it waited in vain.

        That is a rank that `first` names, or else one that a signal had stopped.
        """
        ranks = {
            str(end.spec.ranks[0]): end
            for end in (*self.exits, *self.remaining)
            if len(end.spec.ranks) == 1  # even if it ended early with status 0
        }
        found, seen = self.first, set[int]()
        # Processes that the supervisor ended only report that the others had left.
        while found is not None and found.root_cause is not None and found in self.exits:
            if len(found.spec.ranks) > 1 or found.pid in seen:
                return found
            seen.add(found.pid)
            found = ranks.get(found.root_cause[0], found)
        if found is None and self.timeout_s is None:
            return next((end for end in self.remaining if end.stopped), None)
        if found is not None and found is self.first and found.root_cause is None:
            return next((end for end in self.remaining if end.stopped), found)
        return found

    @property
    def exit_status(self) -> int:
        """The exit status of the run: 0, `first`'s status as in a shell, or 124 if too late."""
        if self.first is None:
            return 0 if self.timeout_s is None and self.cause is None else TIMED_OUT
        code = self.first.code or 0
        return code if code > 0 else 128 - code

    def error(self, *, quote: bool = True) -> RunError | None:
        """Return the error that reports which process failed first, and why; None if all is well.

        It also says where it failed, and what to do.

        Args:
            quote: Whether it shows the last lines of the processes that ended badly; unnecessary if
                the reader has just seen them.
        """
        cause = self.cause
        if cause is None and self.timeout_s is None:
            return None
        if cause is None:
            late = "; ".join(f"{end.spec.name} {end.how}" for end in self.remaining)
            what, shown = f"the run took longer than {self.timeout_s:g} s: {late}", self.remaining
            todo = "read the end of their output; allow more time if they were only slow"
        else:
            what = f"{cause.spec.name} {cause.how}, {cause.after_s:.1f} s after the start"
            if cause.code == 0:
                what += ", before the other processes had ended"
            name = cause.spec.name
            if cause.root_cause is not None and len(cause.spec.ranks) > 1:
                rank, words = cause.root_cause
                name = f"rank {rank}"
                what += f"; by what was written, {name} failed first: {words!r}"
            ended = tuple(end for end in self.exits if end.code != 0 and end is not cause)
            shown = (cause, *ended)
            others = [*ended, *(end for end in self.remaining if end is not cause)]
            if others:
                what += "; then " + "; ".join(f"{end.spec.name} {end.how}" for end in others)
            todo = _STOPPED_TODO if cause.stopped else _TODO.get(cause.signal_name, "")
            if not todo and cause.signal_name:
                todo = "a library crashed; PYTHONFAULTHANDLER=1 shows in which call"
            if not todo:
                todo = f"see the last error that {name} reported"
                todo += "; others followed from it" if others or name != cause.spec.name else ""
        return RunError(what, where=[end.place(quote=quote) for end in shown], todo=todo)

    def __str__(self) -> str:
        """Return the report for users."""
        error = self.error()
        return f"{len(self.exits)} processes ended well" if error is None else str(error)
