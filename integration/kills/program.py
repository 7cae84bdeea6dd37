"""The program of the ranks in a trial: endless boxing steps and pauses, until one rank is killed.

Started by `trial` with `python PROGRAM SETTINGS`, where SETTINGS is JSON. Each rank writes its
process id to `rank-K.pid`, and the first error that boxing raises to `rank-K.error`, both in the
folder of the trial. On SIGUSR1 a rank raises an exception, on SIGUSR2 it calls `sys.exit(4)`, on
SIGHUP `sys.exit(0)`, and on SIGQUIT `os._exit(0)`, at any point of its program.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from sbp_core import B, NdSbp, P, Placement, S
from sbp_core.boxing import BoxingBackend, route
from sbp_core.errors import BoxingError, RunError
from sbp_core.plugins import discover
from sbp_torch.boxing import shard as shards_of
from sbp_torch.testing.boxing import run_route

#: The folder of the stand-in for GPUs and NCCL.
_FAKE_GPUS = Path(__file__).parents[2] / "packages" / "boxing-nccl" / "tests"

#: Rows of the tensors that are moved: some bytes, and about a MiB.
_ROWS = (7, 1000, 4096)

_COLUMNS = 64

#: Longest pause in place of computing, in seconds.
_COMPUTE_S = 0.03


class ToldToFailError(Exception):
    """The error of a rank that fails by raising."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise ToldToFailError("this rank was told to fail")


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(4)


def _exit_0(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _os_exit_0(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)


def _write(path: Path, value: object) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(json.dumps(value), "utf-8")
    unfinished.rename(path)


def build(settings: dict[str, Any]) -> BoxingBackend:
    """Return the backend, not yet open; `nccl` runs over fake GPUs, whose data moves by MPI."""
    if settings["backend"] == "nccl":
        sys.path.append(str(_FAKE_GPUS))
        from fake_device import FakeDevice
        from fake_network import MpiNetwork
        from mpi4py import MPI

        from sbp_boxing_nccl import NcclBackend, NcclBoxingConfig

        device = FakeDevice(MpiNetwork(MPI.COMM_WORLD.Dup()), MPI.COMM_WORLD.Get_rank())
        return NcclBackend(NcclBoxingConfig(**settings["config"]), device=device)
    backend = discover().make("boxing", settings["backend"], settings["config"])
    assert isinstance(backend, BoxingBackend), "kind boxing builds boxing backends"
    return backend


def loop(rank: int, backend: BoxingBackend, settings: dict[str, Any], told: dict[int, str]) -> None:
    """Run random steps, the same on every rank, until boxing raises or this rank has to fail.

    Args:
        rank: This rank.
        backend: The open backend.
        settings: See `main`.
        told: By rank, how a rank that is a thread has to fail.
    """
    mesh = Placement.grid((settings["ranks"],), ("all",))
    kinds = [NdSbp(entry) for entry in (S(0), S(1), B, P)]
    ends = [Placement([rank], ("one",)) for rank in range(settings["ranks"])]
    shared, own = random.Random(settings["seed"]), random.Random()
    communicator, number = backend.communicator(rank), 0
    while True:
        number += 1
        source, target = shared.choice(kinds), shared.choice(kinds)
        before, after = (mesh, source), (mesh, target)
        if shared.random() < 0.3:
            sender, receiver = shared.sample(ends, 2)
            before, after = (sender, NdSbp(B)), (receiver, NdSbp(B))
        shape = (shared.choice(_ROWS), _COLUMNS)
        path = route(shape, "float32", before, after)
        shard = None
        if rank in before[0]:
            shard = shards_of(torch.ones(shape), *before)[rank]
        if rank in told:
            _fail(told[rank])
        time.sleep(own.uniform(0, _COMPUTE_S))
        run_route(
            rank, communicator, path, shard, tag=f"step {number}", deadline_s=settings["deadline_s"]
        )


def _fail(how: str) -> None:
    if how == "exception":
        raise ToldToFailError("this rank was told to fail")
    if how == "exit":
        sys.exit(4)
    if how == "exit 0":
        sys.exit(0)
    while True:  # a stall
        time.sleep(1.0)


def _run(rank: int, backend: BoxingBackend, settings: dict[str, Any], told: dict[int, str]) -> None:
    folder = Path(settings["folder"])
    try:
        loop(rank, backend, settings, told)
    except BoxingError as error:
        _write(folder / f"rank-{rank}.error", [time.monotonic(), str(error)])
        raise


def run_process(settings: dict[str, Any]) -> None:
    """Be one rank of a backend of several processes."""
    backend = build(settings)
    backend.open(range(settings["ranks"]))
    (rank,) = backend.local_ranks()
    signal.signal(signal.SIGUSR1, _raise)
    signal.signal(signal.SIGUSR2, _exit)
    signal.signal(signal.SIGHUP, _exit_0)
    signal.signal(signal.SIGQUIT, _os_exit_0)
    _write(Path(settings["folder"]) / f"rank-{rank}.pid", os.getpid())
    # No try: the trial includes programs that do not close their backend.
    _run(rank, backend, settings, {})


def run_threads(settings: dict[str, Any]) -> None:
    """Be all ranks, as threads; a file `rank-K.told` contains how its rank has to fail."""
    backend = build(settings)
    ranks, folder = range(settings["ranks"]), Path(settings["folder"])
    backend.open(ranks)
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            _run(rank, backend, settings, told)
        except BaseException as error:
            # As in runtimes: the backend does not know which rank failed.
            failure = RunError(f"rank {rank} failed: {error!r}")
            failure.__cause__ = error
            backend.fail(failure)
            _write(folder / f"rank-{rank}.ended", [time.monotonic(), repr(error)])

    threads = {rank: threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks}
    for rank, thread in threads.items():
        thread.start()
        _write(folder / f"rank-{rank}.pid", os.getpid())
    while _num_alive(threads) > list(told.values()).count("stall"):
        for rank in ranks:
            path = folder / f"rank-{rank}.told"
            if rank not in told and path.exists():
                told[rank] = json.loads(path.read_text("utf-8"))
        time.sleep(0.005)
    sys.exit(1)


def _num_alive(threads: dict[int, threading.Thread]) -> int:
    return sum(thread.is_alive() for thread in threads.values())


def main(settings: dict[str, Any]) -> None:
    """Run with these settings: backend, config, ranks, seed, deadline_s, folder, threads."""
    torch.set_num_threads(1)
    if settings["threads"]:
        run_threads(settings)
    else:
        run_process(settings)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
