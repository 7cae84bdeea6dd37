"""The rank that failed first: found in what the processes of a run wrote.

A launcher such as `mpiexec` ends as one process, whose exit code names nobody; and where ranks are
processes of their own, one that waited for the rank that failed may end before it. But the ranks
that remained say for whom they waited (`boxing.processes.call`), and the launcher itself often says
which of its processes it lost (`LaunchSpec.failure_patterns`).
"""

from __future__ import annotations

import re

from sbp_core.boxing.supervision.launch_spec import LaunchSpec

#: What the error of a rank says of another one that does nothing any more.
STOPPED, SILENT = "is stopped by a signal", "gives no sign of life"

#: What ranks say of others, the surest first. A rank that did not arrive may itself have waited for
#: one that stands still, so what stands still goes before who is missing. `.*` is greedy: where
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


class RootCauseFinder:
    """Looks for the name of the rank that failed first in the lines of one process.

    Args:
        spec: The process; one that is a single rank names another.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._patterns = (
            [re.compile(text) for text in spec.failure_patterns] if len(spec.ranks) > 1 else []
        )
        self._own = str(spec.ranks[0]) if len(spec.ranks) == 1 else ""
        self._standing_still: tuple[str, str] | None = None
        self._reported: tuple[str, str] | None = None
        self._not_written: tuple[str, str] | None = None
        self._lost: dict[int, tuple[str, str]] = {}

    def read(self, line: str) -> None:
        """Take in a line; of each kind of sentence the first that is written counts."""
        still = _STILL.search(line)
        if self._standing_still is None and still and still["rank"] != self._own:
            self._standing_still = still["rank"], still[0][:_LONGEST]
        if self._reported is None:
            missed = _MISSED.search(line)
            failed = missed or _FAILED.match(line)
            if failed and failed["rank"] != self._own:
                words = line[failed.start() if missed else failed.end() :]
                self._reported = failed["rank"], words[:_LONGEST]
        not_written = _NOT_WRITTEN.match(line)
        if self._not_written is None and not_written and not_written["rank"] != self._own:
            words = line[not_written.end() :]
            self._not_written = not_written["rank"], words[:_LONGEST]
        for number, pattern in enumerate(self._patterns):
            if number not in self._lost and (lost := pattern.search(line)):
                self._lost[number] = lost["rank"], line.strip()[:_LONGEST]

    @property
    def found(self) -> tuple[str, str] | None:
        """The rank, and the words that name it, or None: of what ranks said, or else a launcher."""
        return (
            self._standing_still
            or self._reported
            or self._not_written
            or (self._lost[min(self._lost)] if self._lost else None)
        )
