"""What holds the processes of a run together, and how it breaks: once, and for all calls.

Which connections there are, and how another process hears of a failure, is the transport's. Moves
nothing and imports no torch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from sbp_core.boxing.call import Call
from sbp_core.errors import BoxingError


class Connections(ABC):
    """The connections of one process to all others; the first failure ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False

    def check_usable(self, call: Call) -> None:
        """Raise `BoxingError` if the connections were closed or have failed."""
        if self._closed:
            raise call.failed("the boxing backend was closed")
        if self._failure is not None:
            raise call.failed(str(self._failure)) from self._failure

    def broken(self, call: Call, error: BoxingError) -> BoxingError:
        """Break everything because a call failed; return the error to raise."""
        if self._failure is not None:
            return call.failed(str(self._failure))
        self.fail(error)
        return error

    def fail(self, error: BaseException) -> None:
        """Make every call fail, here and on the ranks that wait for this one."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        self._announce(str(error) or type(error).__name__)

    def close(self) -> None:
        """Release everything; waits a while for messages and ranks that are on their way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._release()

    @abstractmethod
    def _announce(self, text: str) -> None:
        """Tell the other ranks why this one failed, and unblock what waits; called once."""

    @abstractmethod
    def _release(self) -> None:
        """Leave the other ranks, well (`_failure` is None) or not; called once."""
