"""Whether a step commits or is aborted: the commit and an interrupt race, and the first wins."""

from __future__ import annotations

import threading


class Commitment:
    """The outcome of a step, which its threads and an interrupt decide on once.

    An interrupt aborts the step. A rank of this process commits it when it enters the commit, or is
    about to overwrite a state; ranks of other processes may have begun by then, so that a later
    interrupt has to wait.
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
