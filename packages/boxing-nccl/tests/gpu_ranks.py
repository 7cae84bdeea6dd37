"""Ranks that are processes with a GPU each, which stay alive between jobs."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbp_torch.testing.boxing import Job

#: Seconds that a job may take before the tests give up.
_LIMIT_S = 600.0


class GpuRanks:
    """Processes of ranks 0 .. n-1; rank i has GPU i."""

    def __init__(self, num_ranks: int, **config: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, theirs, config), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, num_ranks: int, job: Job) -> Sequence[Any]:
        """Call `job(rank, backend)` on ranks 0 .. num_ranks - 1; return results in rank order."""
        place = f"file://{Path(self._folder.name, f'store-{self._num_jobs}')}"
        self._num_jobs += 1
        pipes = self._pipes[:num_ranks]
        for pipe in pipes:
            pipe.send((num_ranks, place, job))
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(_LIMIT_S), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10.0)
            process.kill()
        self._folder.cleanup()


def _work(rank: int, pipe: Any, config: dict[str, Any]) -> None:
    from sbp_boxing_nccl.configs import NcclBoxingConfig
    from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend

    while (order := pipe.recv()) is not None:
        num_ranks, place, job = order
        backend = NcclBackend(
            NcclBoxingConfig(
                bootstrap="store",
                init_method=place,
                rank=rank,
                world_size=num_ranks,
                device=f"cuda:{rank}",
                **config,
            )
        )
        try:
            backend.open(range(num_ranks))
            answer = job(rank, backend), None
        except Exception as error:
            backend.fail(error)
            answer = None, error
        finally:
            backend.close()
        pipe.send(answer)
