"""How a process leaves its MPI job: well, or with all others.

A process that ends waits in `MPI_Finalize` for all others, which may wait for it in a step: a
program that raises would hold up the whole job, and `mpiexec` would not notice. So whoever ends
without having left well ends the job. Python runs the handler here before mpi4py's own.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from sbp_core.processes import ProcessBackend

_log = logging.getLogger(__name__)

#: Exit status of a job that was ended.
_STATUS = 1

#: Seconds that the program may go on after its main thread has ended.
_GRACE_S = 1.0

#: Seconds that ranks which all have failed wait for each other, so that each can say what it saw.
_FINAL_BARRIER_S = 3.0

#: Seconds between two looks at the main thread, and at the other ranks.
_LOOK_S, _POLL_S = 0.2, 0.01


class JobExit:
    """Ends the whole MPI job if this process ends while other ranks count on it.

    The main thread has to live for as long as the backend is open: a process whose main thread has
    raised, but which other threads keep alive, ends the job as well.

    Args:
        comm: Communicator of all ranks of the backend; its owner keeps it.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        self._mpi = mpi
        self._has_failed = False
        self._has_left = threading.Event()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="sbp-exit", daemon=True)
        self._thread.start()

    def leave(self, *, well: bool) -> None:
        """Let go: no other rank counts on this one any more.

        Args:
            well: Whether the other ranks can be trusted to end as well.
        """
        self._has_failed = not well
        self._has_left.set()
        if well:
            atexit.unregister(self._at_exit)
            self._thread.join()

    def _at_exit(self) -> None:
        if not self._has_left.is_set():
            self._abort("the program ended without closing the boxing backend")
        elif not self._all_have_come():
            self._abort("the run has failed, and other ranks do not end")

    def _watch(self) -> None:
        """Wait until the main thread has ended, or the backend was left."""
        main = threading.main_thread()
        while main.is_alive():
            if not self._has_left.wait(_LOOK_S):
                continue
            if not self._has_failed:
                return
            main.join(_LOOK_S)
        time.sleep(_GRACE_S)
        if self._has_failed or not self._has_left.is_set():
            others = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
            self._abort(
                "the main thread ended without closing the boxing backend; threads that are left: "
                + ", ".join(others)
            )

    def _all_have_come(self) -> bool:
        """Wait a moment for all ranks to come to their ends; say whether they did."""
        try:
            request = self._comm.Ibarrier()
            end = time.monotonic() + _FINAL_BARRIER_S
            while not request.Test():
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:  # mpi4py's: the communicator is broken, or its owner has freed it
            return False
        return True

    def _abort(self, why: str) -> None:
        _log.critical("rank %d: %s; all ranks are ended", self._mpi.COMM_WORLD.Get_rank(), why)
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(_STATUS)


class JobBackend(ProcessBackend):
    """A backend whose processes may be those of an MPI job, which ends with the first that fails.

    What connects it sets `_exit`, as soon as others count on this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exit: JobExit | None = None

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`; of those that cannot, all ranks end, or none."""
        try:
            super().open(ranks)
        finally:
            if self._exit is not None and self._connections is None:
                self._exit.leave(well=False)

    def close(self) -> None:
        """See `BoxingBackend.close`; if an exception is on its way, it fails the other ranks too.

        `SystemExit` is one, unless its status means success.
        """
        error = sys.exc_info()[1]
        quits = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not quits:
            self.fail(error)
        try:
            super().close()
        finally:
            if self._exit is not None:
                self._exit.leave(well=self._connections is not None and self._connections.is_well)
