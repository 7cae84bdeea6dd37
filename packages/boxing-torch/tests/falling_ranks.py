"""Processes that are ranks of one run until a test brings one of them down.

Unlike those of `rank_pool` they are started for one test each: every rank says when it is ready,
and how its last call ended.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import TorchWorld

#: (rank, its open backend, called when it is ready; returns when all are).
Life = Callable[[int, TorchBackend, Callable[[], Any]], None]

#: Seconds that ranks may take to start, and to come down, before a test gives up.
_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Fall:
    """How one rank came down.

    Args:
        error: What its last call raised.
        code: Exit code of its process; 0 unless a thread was in the way of its end.
    """

    error: str
    code: int | None


def bring_down(
    num_ranks: int,
    life: Life,
    blow: Callable[[int], None] | None,
    *,
    failing_rank: int,
    hosted: bool,
) -> dict[int, Fall]:
    """Run `life` on some ranks, strike one when all are ready, and return how the others fell.

    Args:
        num_ranks: How many.
        life: What each does; it ends by an exception.
        blow: Called with the process id of the failing rank when all are ready; None if its life
            ends by itself.
        failing_rank: The rank that is struck; its process is killed in the end.
        hosted: Whether rank 0 hosts the store, and not this process.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        arguments = (rank, num_ranks, life, theirs, store.port, hosted)
        process = context.Process(target=_live, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = rank
    try:
        for pipe in pipes:
            assert pipe.poll(_LIMIT_S), "a rank did not get ready"
            came = pipe.recv()
            assert came == "ready", came
        for pipe in pipes:
            pipe.send("go")
        if blow is not None:
            blow(processes[failing_rank].pid or 0)
        told: dict[int, str] = {}
        waiting = {pipe: rank for pipe, rank in pipes.items() if rank != failing_rank}
        while waiting:
            ready = wait(list(waiting), _LIMIT_S)
            assert ready, f"ranks {sorted(waiting.values())} did not come down"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                told[waiting.pop(pipe)] = pipe.recv()
        for rank in told:
            processes[rank].join(_LIMIT_S)
        return {
            rank: Fall(error=error, code=processes[rank].exitcode) for rank, error in told.items()
        }
    finally:
        for process in processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _live(rank: int, num_ranks: int, life: Life, pipe: Connection, port: int, hosted: bool) -> None:
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)
    if hosted:
        store = _store_of_rank_0(rank, store)
    backend = TorchBackend(
        TorchBoxingConfig(), world=TorchWorld(rank=rank, size=num_ranks, store=store)
    )
    backend.open(range(num_ranks))
    try:
        life(rank, backend, lambda: (pipe.send("ready"), pipe.recv()))
    except SystemExit:
        sys.exit(3)
    except Exception as error:
        backend.fail(error)
        backend.close()
        pipe.send(str(error))


def _store_of_rank_0(rank: int, meeting: Any) -> Any:
    """Return a store that rank 0 hosts; the others learn its port at the store of the test."""
    limit = timedelta(seconds=_LIMIT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        meeting.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False, timeout=limit)
