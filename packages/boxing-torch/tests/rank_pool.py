"""Processes that stay alive between tests, each a rank of whatever backend a test opens.

This process hosts the store; every run has a part of it to itself.
"""

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import TorchWorld

_TIMEOUT = timedelta(seconds=60)

#: (rank, its open backend) -> picklable result.
Job = Callable[[int, TorchBackend], Any]


class RankPool:
    """Ranks 0 .. n - 1, started when they are first needed.

    Args:
        device: Where their shards live: `cpu`, or `cuda` for one GPU each.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
        )
        self._workers: list[tuple[Any, Connection]] = []
        self._num_runs = 0

    def run(self, num_ranks: int, job: Job) -> Sequence[Any]:
        """Call `job(rank, backend)` on ranks 0 .. num_ranks - 1; return results in rank order."""
        while len(self._workers) < num_ranks:
            self._start()
        self._num_runs += 1
        for rank, (_, pipe) in enumerate(self._workers[:num_ranks]):
            pipe.send((rank, num_ranks, f"run-{self._num_runs}", pickle.dumps(job)))
        answers = [pipe.recv() for _, pipe in self._workers[:num_ranks]]
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.send(None)
            process.join()
            pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, self._store.port, self._device), daemon=True
        )
        process.start()
        theirs.close()
        self._workers.append((process, ours))


def work(pipe: Connection, port: int, device: str) -> None:
    """Run the jobs that come, as one rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    while (given := pipe.recv()) is not None:
        rank, num_ranks, run, job = given
        world = TorchWorld(rank=rank, size=num_ranks, store=dist.PrefixStore(run, store))
        own = f"{device}:{rank}" if device == "cuda" else device
        backend = TorchBackend(TorchBoxingConfig(device=own), world=world)
        try:
            backend.open(range(num_ranks))
            pipe.send((pickle.loads(job)(rank, backend), None))
        except Exception as error:
            backend.fail(error)
            pipe.send((None, error))
        finally:
            backend.close()
