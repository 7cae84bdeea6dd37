"""Watch the deadlines of NCCL calls and of GPU work that no caller waits for.

NCCL may block its caller until the other ranks call it too, and a caller that runs ahead does not
wait for its work. So a thread checks all of it now and then. If something takes too long, it makes
all connections fail, which unblocks the callers:

    caller       inside NCCL, waits for rank 1 ...................... freed, raises the error
    deadlines    looks .. looks .. the time is over: `fail`, which aborts all communicators

Other processes are watched by `sbp_core.processes.failure_detector`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sbp_boxing_nccl.nccl.nccl_group import NcclWork
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import PATIENCE_S

#: Seconds between two checks: while something is watched, and while nothing is.
_BUSY_S, _IDLE_S = 0.002, 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedWork:
    """One call of NCCL, and the work that it started, while its deadline is watched.

    Args:
        call: The boxing call that it belongs to.
        missing: Returns the ranks that are missing, once its time is over.
        report: Announces to the other ranks that this rank waits here.
        work: The work on the GPU; None while it is being launched.
        caller_waits: Whether the caller itself waits for the work.
        over: Whether it is finished, so that watching ends.
        error: The error that was raised because of it.
    """

    call: CollectiveCall
    missing: Callable[[], Iterable[int]]
    report: Callable[[], object]
    work: NcclWork | None = None
    caller_waits: bool = False
    over: bool = False
    error: BoxingError | None = None
    begun_s: float = field(default_factory=time.monotonic)
    reported: bool = False


class Deadlines:
    """A thread that watches all deadlines of one process.

    Args:
        use: Makes a thread use the GPU.
        check: Raises `BoxingError` if the connections have failed.
        fail: Breaks all connections.
    """

    def __init__(
        self,
        use: Callable[[], None],
        check: Callable[[CollectiveCall], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._use = use
        self._check = check
        self._fail = fail
        self._lock = threading.Lock()
        self._entries: list[WatchedWork] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sbp-nccl-deadlines", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def launching(
        self,
        call: CollectiveCall,
        missing: Callable[[], Iterable[int]],
        report: Callable[[], object] = lambda: None,
    ) -> Iterator[WatchedWork]:
        """Watch a call of NCCL, and afterwards the `work` that the caller has put into the entry.

        NCCL may block its caller. An abort unblocks the caller, which then raises the entry's
        error.
        """
        entry = WatchedWork(call=call, missing=missing, report=report)
        with self._lock:
            self._entries.append(entry)
        try:
            yield entry
        except RuntimeError as error:
            if entry.error is not None:
                raise entry.error from error
            raise
        finally:
            entry.over = entry.over or entry.caller_waits or entry.work is None
            if entry.over:
                # At once: an entry keeps tensors alive.
                with self._lock:
                    self._entries = [other for other in self._entries if other is not entry]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched."""
        return not self._entries

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        self._use()
        while not self._closed.wait(_BUSY_S if self._entries else _IDLE_S):
            with self._lock:
                entries = list(self._entries)
            for entry in entries:
                if not entry.over:
                    self._look_at(entry)
            with self._lock:
                self._entries = [entry for entry in self._entries if not entry.over]

    def _look_at(self, entry: WatchedWork) -> None:
        call, work = entry.call, entry.work
        try:
            if work is not None and work.is_done():
                entry.over = True
                return
            self._check(call)
            if call.is_over:
                raise call.missing(entry.missing())
        except RuntimeError as error:
            ours = error if isinstance(error, BoxingError) else None
            entry.error = ours or call.failed(f"NCCL reported: {error}")
            entry.over = True
            self._fail(entry.error)
            return
        if time.monotonic() - entry.begun_s > PATIENCE_S and not entry.reported:
            entry.reported = True
            entry.report()
