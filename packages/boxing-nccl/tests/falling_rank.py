"""What `mpiexec` starts in `test_failures`: one of three ranks, one of which comes down.

Arguments: a folder, the rank that fails, how it fails. `ready-RANK` holds the process id of a rank
that is ready; all go on when there is a file `go`. `fall-RANK.pickle` says how the last call of a
rank ended.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from mpi_rank import write

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Sbp

DEADLINE_S = 2.0


def main(folder: Path, failing_rank: int, how: str) -> None:
    backend = MpiBackend(MpiBoxingConfig())
    backend.open([0, 1, 2])
    (rank,) = backend.local_ranks()
    try:
        live(rank, backend, folder, failing_rank, how)
    except Exception as error:
        backend.fail(error)
        backend.close()
        write(folder / f"fall-{rank}.pickle", str(error))
    # Long enough for the others to say what they saw: mpiexec ends all when one has ended.
    time.sleep(2.0)
    os._exit(1)


def live(rank: int, backend: MpiBackend, folder: Path, failing_rank: int, how: str) -> None:
    """Reduce once; then one rank fails, one reduces, and one computes while it receives."""
    end, everyone = backend.communicator(rank), one_step(P, B, [0, 1, 2], [0, 1, 2])
    deadline_s = DEADLINE_S if how == "stop" else 600.0
    end.collective(everyone, torch.ones(4, 2), tag="first", deadline_s=60.0)
    write(folder / f"ready-{rank}", os.getpid())
    while not (folder / "go").exists():
        time.sleep(0.01)
    if rank == failing_rank:
        fall(how, backend)
    if rank == min({0, 1, 2} - {failing_rank}):
        end.collective(everyone, torch.ones(4, 2), tag="gradients", deadline_s=deadline_s)
    step = one_step(B, B, [failing_rank], [rank])
    under_way = end.begin_receive(step, None, tag="activations", deadline_s=deadline_s)
    time.sleep(0.5)
    under_way.wait()


def fall(how: str, backend: MpiBackend) -> None:
    if how == "raise":
        raise ValueError("loss is not a number")
    if how == "close":
        backend.close()
    if how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    time.sleep(120)  # until it is killed


def one_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> BoxingStep:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
