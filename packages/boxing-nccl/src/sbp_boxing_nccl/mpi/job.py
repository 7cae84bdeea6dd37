"""How a process enters its MPI job, and how it leaves it: well, or with all others.

mpi4py is an extra of this package, so that no module imports it on its own: `load_mpi` does, or
says how to get it. A process that ends waits in `MPI_Finalize` for all others, which may wait for
it in a step: a program that raises would hold up the whole job, and `mpiexec` would not notice. So
whoever ends without having left well ends the job (`JobExit`). Python runs the handler here before
mpi4py's own.
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

#: Exit status of a job that was ended.
_STATUS = 1

#: Seconds that the program may go on after its main thread has ended.
_GRACE_S = 1.0

#: Seconds that ranks which all have failed wait for each other, so that each can say what it saw.
_FINAL_BARRIER_S = 3.0

#: Seconds between two looks at the main thread, and at the other ranks.
_LOOK_S, _POLL_S = 0.2, 0.01


def load_mpi(limit_s: float | None = None) -> Any:
    """Return the module `mpi4py.MPI`; importing it starts MPI, which waits for all processes.

    Args:
        limit_s: Seconds after which this process ends if they have not all come; None for never.

    Raises:
        BoxingError: mpi4py or an MPI library is not installed, or it allows only one thread; or a
            rank of this host has ended, which no MPI would notice.
    """
    limit_s = None if "mpi4py.MPI" in sys.modules else limit_s
    if "mpi4py.MPI" not in sys.modules:
        Siblings.check_before_waiting()
    # MPI_Init keeps Python's interpreter to itself while it waits, so no thread could end this
    # process. The standard error may be none that a traceback can be written to.
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
    """Import MPI; the name is what the traceback shows of a process that waited too long."""
    return importlib.import_module("mpi4py.MPI")


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
            return
        # Wait a moment for all ranks to come to their ends.
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
