"""`Commitment`: decide once whether a step commits (updates its states) or is aborted by Ctrl-C.

Worker threads ask to commit; the session asks to abort after an interrupt. The first request wins.
"""

from __future__ import annotations

import threading


class Commitment:
    """The outcome of a step, decided once by its threads or by an interrupt.

    An interrupt aborts the step. A rank commits the step when it reaches the commit, or just before
    it overwrites a state. Ranks of other processes may have started to update by then, so a later
    interrupt waits for the end of the step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commits: bool | None = None

    def try_commit(self) -> bool:
        """Commit the step unless it is aborted; return whether it commits."""
        return self._decide(True)

    def try_abort(self) -> bool:
        """Abort the step unless it commits; return whether it is aborted."""
        return not self._decide(False)

    def _decide(self, commits: bool) -> bool:
        with self._lock:
            if self._commits is None:
                self._commits = commits
            return self._commits
