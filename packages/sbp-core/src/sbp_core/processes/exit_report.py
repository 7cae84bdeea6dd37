"""How the processes of a run ended, as values and as the message that a user reads.

A launcher such as `mpiexec` ends as one process, whose exit code names nobody; and where ranks are
processes of their own, one that waited for the rank that failed may end before it. But the ranks
that remained say for whom they waited (`boxing.collective_call`), and the launcher itself often
says which of its processes it lost (`LaunchSpec.failure_patterns`). `RootCauseFinder` reads that.
"""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.errors import RunError

#: What the error of a rank says of another one that does nothing any more.
STOPPED, SILENT = "is stopped by a signal", "gives no sign of life"

#: What ranks say of others, the surest first. A rank that did not arrive may itself have waited for
#: one that hangs, so a rank that hangs goes before who is missing. `.*` is greedy: where
#: rank 2 reports what rank 1 reported, the last name in the line is that of the cause.
_STILL = re.compile(rf"rank (?P<rank>\d+) \([^()]*\):? (?:{STOPPED}|{SILENT})")
#: The same of one that a signal has stopped, on the host of who says so.
STOPPED_HERE = re.compile(rf"rank \d+ \(pid (?P<process>\d+) on this host\):? {STOPPED}")
_MISSED = re.compile(r"ranks that did not (?:arrive|open their boxing backend): (?P<rank>\d+)")
_FAILED = re.compile(r".*could not complete: (?=rank (?P<rank>\d+) (?:reported:|\(pid))")
#: What ends ranks that only wait for one which cannot write its part of a checkpoint. A warning
#: ends nobody: that one is made up for by a later checkpoint.
_NOT_WRITTEN = re.compile(r"(?!WARNING ).*cannot be written: (?=rank (?P<rank>\d+) says:)")

#: Characters of a line that are quoted.
_LONGEST = 200

#: Exit status of a run that took too long, as that of the command `timeout`.
TIMED_OUT = 124

_TODO = {
    "SIGKILL": "nothing can catch SIGKILL: see the kernel's log (`dmesg`) for lack of memory, or "
    "ask who sent it",
    "SIGTERM": "something outside of the run ended it; ask the scheduler, or who sent it",
}

_STOPPED_TODO = "see what stopped it: a debugger, or a batch system that suspends jobs"


class RootCauseFinder:
    """Looks for the name of the rank that failed first in the lines of one process.

    Args:
        spec: The process; one that is a single rank names another.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        is_rank = len(spec.ranks) == 1
        self._patterns = [] if is_rank else [re.compile(text) for text in spec.failure_patterns]
        self._own = str(spec.ranks[0]) if is_rank else ""
        #: The rank and the words that name it, by kind of sentence, the surest first.
        self._found: dict[int, tuple[str, str]] = {}

    def read(self, line: str) -> None:
        """Take in a line; of each kind of sentence the first that is written counts."""
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
        """The rank, and the words that name it, or None: of what ranks said, or else a launcher."""
        return self._found[min(self._found)] if self._found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How one process ended, or what it was doing when the supervisor had to end it.

    Args:
        spec: What it was started as.
        pid: Its process id.
        code: Its exit code, minus the number of the signal that ended it, or None if it had not
            ended by itself.
        after_s: Seconds from the start of the run.
        stopped: Whether it had not ended because a signal had stopped it.
        last_lines: The last that it wrote.
        root_cause: The rank that failed first and the words that say so, by what it wrote, if it
            wrote of any; of a process that is one rank, it is another one.
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
        """Return where it ran, and what it said last if that is to be quoted."""
        place = f"{self.spec.name}: host {socket.gethostname()}, process {self.pid}"
        if not quote:
            return place
        lines = [f"    {line}" for line in self.last_lines]
        return "\n".join([f"{place}; it said {'last:' if lines else 'nothing'}", *lines])

    @property
    def how(self) -> str:
        """How it ended, in words that follow its name."""
        if self.code is None:
            return "had been stopped by a signal" if self.stopped else "was still running"
        if self.code < 0:
            return f"was ended by {self.signal_name}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How a run ended.

    Args:
        exits: The processes that ended by themselves, in this order.
        remaining: Those that were ended by the supervisor, as they were before.
        timeout_s: The time that the run had, if it took longer.
        stopped_by: Number of the signal that asked all processes to end, if one did.
    """

    exits: tuple[ProcessExit, ...]
    remaining: tuple[ProcessExit, ...] = ()
    timeout_s: float | None = None
    stopped_by: int | None = None

    @property
    def first(self) -> ProcessExit | None:
        """The process that ended badly before all others, if one did."""
        return next((end for end in self.exits if end.code != 0), None)

    @property
    def cause(self) -> ProcessExit | None:
        """The process that the others followed: `first`, or the rank that it waited for in vain.

        That is one that it names, or else one that a signal had stopped.
        """
        ranks = {
            str(end.spec.ranks[0]): end
            for end in (*self.exits, *self.remaining)
            if len(end.spec.ranks) == 1  # also of one that ended with status 0 in the middle
        }
        found, seen = self.first, set[int]()
        # What was ended by the supervisor only says of the others that they had gone.
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
        """The exit status of the whole: 0, that of `first` as a shell shows it, or 124 for late."""
        if self.first is None:
            return 0 if self.timeout_s is None and self.cause is None else TIMED_OUT
        code = self.first.code or 0
        return code if code > 0 else 128 - code

    def error(self, *, quote: bool = True) -> RunError | None:
        """Return the error that says who failed first, where, how, and what to do; None if well.

        Args:
            quote: Whether it shows the last lines of those that ended badly; needless where the
                reader has just seen them.
        """
        cause = self.cause
        if cause is None and self.timeout_s is None:
            return None
        if cause is None:
            late = "; ".join(f"{end.spec.name} {end.how}" for end in self.remaining)
            what, shown = f"the run took longer than {self.timeout_s:g} s: {late}", self.remaining
            todo = "see what those wrote last; allow more time if they were only slow"
        else:
            what = f"{cause.spec.name} {cause.how}, {cause.after_s:.1f} s after the start"
            if cause.code == 0:
                what += ", before the others were through"
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
                todo = f"mend what was said last by {name}"
                todo += "; the others only followed" if others or name != cause.spec.name else ""
        return RunError(what, where=[end.place(quote=quote) for end in shown], todo=todo)

    def __str__(self) -> str:
        """What a user reads."""
        error = self.error()
        return f"{len(self.exits)} processes ended well" if error is None else str(error)
