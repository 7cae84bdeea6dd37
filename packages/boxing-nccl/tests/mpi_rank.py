"""What `mpiexec` starts in the tests: one rank, which runs the jobs that it finds in a folder.

`job-K.pickle` holds (number of ranks, job); `result-K-RANK.pickle` answers it with (result, error).
A file `stop` ends the process. Files, and not MPI, carry the jobs: a rank that waits for the next
one does not keep a core busy, and a job that breaks a backend does not stop the next.
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend


def main(folder: Path) -> None:
    rank, number = MPI.COMM_WORLD.Get_rank(), 0
    while not (folder / "stop").exists():
        given = folder / f"job-{number}.pickle"
        if not given.exists():
            time.sleep(0.01)
            continue
        num_ranks, job = pickle.loads(given.read_bytes())
        if rank < num_ranks:
            answer = folder / f"result-{number}-{rank}.pickle"
            write(answer, run(rank, num_ranks, job))
        number += 1


def run(rank: int, num_ranks: int, job: Any) -> tuple[Any, Exception | None]:
    everyone = MPI.COMM_WORLD.Get_group()
    comm = MPI.COMM_WORLD.Create_group(everyone.Incl(list(range(num_ranks))))
    backend = MpiBackend(MpiBoxingConfig(), comm=comm)
    try:
        backend.open(range(num_ranks))
        return job(rank, backend), None
    except Exception as error:
        backend.fail(error)
        return None, error
    finally:
        backend.close()


def write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
