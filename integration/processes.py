"""Run the ranks of a test as forked processes, so that PyTorch is imported once.

Their boxing backend is `torch` over gloo, with a rendezvous in a file.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from forked import can_fork
from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import discover

#: (rank, backend that is not yet open) -> picklable result. If it cannot be forked, it must be a
#: module-level function.
Job = Callable[[int, BoxingBackend], Any]

#: Seconds after which ranks that still run are ended.
LIMIT_S = 240.0


def run_ranks(num_ranks: int, job: Job) -> list[Any]:
    """Call `job(rank, backend)` in a process for each rank; return the results in rank order.

    Raises:
        AssertionError: a rank failed, with its traceback, or did not end in time.
    """
    context = multiprocessing.get_context("fork" if can_fork() else "spawn")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # A fork does not copy the threads of the test runner, which are not needed.
        warnings.simplefilter("ignore", DeprecationWarning)
        ranks = {}
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, num_ranks, f"file://{folder}/store", job, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks[ours] = (rank, process)
        try:
            return _answers(dict(ranks))
        finally:
            for _, process in ranks.values():
                process.kill()
                process.join()


def _answers(waiting: dict[Connection, tuple[int, Any]]) -> list[Any]:
    found: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), LIMIT_S)
        late = [rank for rank, _ in waiting.values()]
        assert ready, f"ranks {late} did not end in {LIMIT_S:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank, _ = waiting.pop(pipe)
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                result, error = None, "the process ended"
            assert error is None, f"rank {rank} failed:\n{error}"
            found[rank] = result
    return [found[rank] for rank in sorted(found)]


def _work(rank: int, num_ranks: int, init_method: str, job: Job, pipe: Connection) -> None:
    settings = {"rank": rank, "world_size": num_ranks, "init_method": init_method}
    try:
        backend = discover(strict=True).make("boxing", "torch", settings)
        # Send bytes: tensors themselves would be in memory of this process, which ends.
        pipe.send_bytes(pickle.dumps((job(rank, backend), None)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
