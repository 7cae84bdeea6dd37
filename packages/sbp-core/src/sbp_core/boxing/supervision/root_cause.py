"""Which rank of a launcher fell first, by what its processes wrote.

A launcher ends as one process, whose exit code names nobody. The ranks that remained say whom they
missed (`boxing.processes.call`), and the launcher whom it lost (`LaunchSpec.tells`).
"""

from __future__ import annotations

import re

from sbp_core.boxing.supervision.launch_spec import LaunchSpec

#: What the error of a rank says of another one that does nothing any more.
STOPPED, SILENT = "is stopped by a signal", "gives no sign of life"

#: What ranks say of others. A report of a report ends with the cause; and who did not arrive may
#: have waited for one that does nothing any more.
_STILL = re.compile(rf"rank (?P<rank>\d+) \([^()]*\): (?:{STOPPED}|{SILENT})")
_MISSED = re.compile(r"ranks that did not arrive: (?P<rank>\d+)")
_FAILED = re.compile(r".*could not complete: (?=rank (?P<rank>\d+) (?:reported:|\(pid))")

#: Characters of a line that are quoted.
_LONGEST = 200


class RootCause:
    """Looks for the name of the rank that fell first in the lines of one process.

    Args:
        start: The process; nothing is looked for if it is a single rank.
    """

    def __init__(self, start: LaunchSpec) -> None:
        self._patterns = [re.compile(text) for text in start.tells] if len(start.ranks) > 1 else []
        self._reads_ranks = len(start.ranks) > 1
        self._still: tuple[str, str] | None = None
        self._said: tuple[str, str] | None = None
        self._lost: dict[int, tuple[str, str]] = {}

    def read(self, line: str) -> None:
        """Take in a line."""
        if self._reads_ranks and self._still is None and (still := _STILL.search(line)):
            self._still = still["rank"], still[0][:_LONGEST]
        if self._reads_ranks and self._said is None:
            missed = _MISSED.search(line)
            if failed := missed or _FAILED.match(line):
                words = line[failed.start() if missed else failed.end() :]
                self._said = failed["rank"], words[:_LONGEST]
        for number, pattern in enumerate(self._patterns):
            if number not in self._lost and (lost := pattern.search(line)):
                self._lost[number] = lost["rank"], line.strip()[:_LONGEST]

    @property
    def found(self) -> tuple[str, str] | None:
        """The rank, and the words that name it, or None: of what ranks said, or else a launcher."""
        return self._still or self._said or (self._lost[min(self._lost)] if self._lost else None)
