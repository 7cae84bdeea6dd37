"""The calls of one process that have begun and are not over: what its failure detector looks at."""

from __future__ import annotations

import threading

from sbp_core.boxing.processes.call import CollectiveCall


class PendingCalls:
    """The calls of one process that are under way, at most one a thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, CollectiveCall] = {}
        #: The call that began last, on whichever thread.
        self.latest: CollectiveCall | None = None

    def begin(self, call: CollectiveCall) -> None:
        """Note that a call begins on this thread."""
        self._by_thread[threading.get_ident()] = self.latest = call

    def end(self) -> None:
        """Note that the call of this thread is over."""
        self._by_thread.pop(threading.get_ident(), None)

    def all(self) -> list[CollectiveCall]:
        """Return the calls that are not over."""
        # A copy, made by `list` in one go: other threads begin and end calls meanwhile.
        return list(self._by_thread.values())


class PendingCall:
    """The time in which a call is under way; a class, as generators take longer to enter.

    Args:
        calls: The calls of this process.
        call: One of them.
    """

    __slots__ = ("_call", "_calls")

    def __init__(self, calls: PendingCalls, call: CollectiveCall) -> None:
        self._calls = calls
        self._call = call

    def __enter__(self) -> None:
        self._calls.begin(self._call)

    def __exit__(self, *_: object) -> None:
        self._calls.end()
