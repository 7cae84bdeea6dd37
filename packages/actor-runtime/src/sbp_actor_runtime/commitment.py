"""Which comes first: the interrupt of a step, or its commit."""

from __future__ import annotations

import threading


class Commitment:
    """Whether a step is still to be given up, or may overwrite states: decided once, by the first.

    An interrupt gives it up; a rank of this process takes it through as it enters the commit, or
    is about to overwrite a state. Other ranks may have begun by then, so that an interrupt waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._goes_through: bool | None = None

    def goes_through(self) -> bool:
        """Take the step through, if it was not given up; return whether that is so."""
        return self._decided(True)

    def give_up(self) -> bool:
        """Give the step up, if it does not go through; return whether that is so."""
        return not self._decided(False)

    def _decided(self, wanted: bool) -> bool:
        with self._lock:
            if self._goes_through is None:
                self._goes_through = wanted
            return self._goes_through
