"""What `mpiexec` starts in `test_exit`: a rank which leaves in the way that its argument says.

The other ranks wait for the first one in a step, and end with status 7 if that raises.
"""

import os
import sys
import threading
import time

import torch

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_core.boxing.router import route
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P


def main(how: str) -> None:
    if how == "never comes" and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        time.sleep(100.0)
    limit_s = 2.0 if how == "never comes" else 60.0
    backend = MpiBackend(MpiBoxingConfig(connect_timeout_s=limit_s))
    backend.open([0, 1])
    reduce(backend)
    (rank,) = backend.local_ranks()
    if rank == 0:
        leave(how, backend)
        return
    if how != "well":
        reduce(backend)
    backend.close()


def reduce(backend: MpiBackend) -> None:
    mesh, (rank,) = Placement([0, 1], ("x",)), backend.local_ranks()
    (step,) = route((4, 2), "float32", (mesh, NdSbp(P)), (mesh, NdSbp(B))).steps
    backend.communicator(rank).collective(step, torch.ones(4, 2), tag="sum", deadline_s=100.0)


def leave(how: str, backend: MpiBackend) -> None:
    if how == "raises":
        raise ValueError("loss is not a number")
    if how == "quits":
        sys.exit(4)
    if how == "raises, closing":
        try:
            raise ValueError("loss is not a number")
        finally:
            backend.close()
    if how == "quits, closing":
        try:
            sys.exit(4)
        finally:
            backend.close()
    if how == "thread quits":
        thread = threading.Thread(target=sys.exit, args=(4,))
        thread.start()
        thread.join()
        return
    if how == "thread stays":
        threading.Thread(target=time.sleep, args=(100.0,), name="reader").start()
        raise ValueError("loss is not a number")
    if how == "well":
        threading.Thread(target=time.sleep, args=(0.5,)).start()
        backend.close()


if __name__ == "__main__":
    main(sys.argv[1])
