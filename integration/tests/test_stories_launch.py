"""Ranks that start apart, and sweeps over ranks that a launcher has started: folders and logs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import DATA, SMALL, losses
from test_launchers import MPIEXEC, TORCHRUN, started

COMMAND = ("-m", "sbp_launch.apps.train", *SMALL, *DATA, "trainer.compare_steps=0")

#: Seconds between the starts of two ranks.
APART_S = 5.0


def settings_of(run: Path) -> list[str]:
    """Return the hash of the settings that each rank of a run has read, from its log."""
    logs = sorted((run / "logs").glob("rank_*.txt"))
    return [re.findall(r"^settings: (\w+)$", log.read_text("utf-8"), re.M)[0] for log in logs]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_start_apart_have_one_folder_and_one_config(tmp_path: Path, late: int) -> None:
    port = str(free_port())
    running = {}
    for rank in (1 - late, late):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        variables = {name: str(value) for name, value in world.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        running[rank] = subprocess.Popen(
            [sys.executable, *COMMAND, "boxing=torch"],
            cwd=tmp_path,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        time.sleep(APART_S if rank != late else 0.0)
    try:
        told = {rank: process.communicate(timeout=200)[0] for rank, process in running.items()}
    finally:
        for process in running.values():
            process.kill()

    assert [process.returncode for process in running.values()] == [0, 0], told
    (run,) = (tmp_path / "runs").iterdir()
    assert len(losses(run)) == 3
    hashes = settings_of(run)
    assert len(hashes) == 2 and len(set(hashes)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["spawn", "torchrun", "mpiexec", "threads"])
def test_a_sweep_of_two_has_two_folders_with_all_ranks(tmp_path: Path, by: str) -> None:
    starts = {"torchrun": TORCHRUN, "mpiexec": (*MPIEXEC, sys.executable)}.get(
        by, (sys.executable,)
    )
    boxing = {"threads": "local", "mpiexec": "mpi"}.get(by, "torch")
    sweep = ("-m", "optimizer.lr=1e-3,1e-2", "hydra.sweep.dir=sweep")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    done = started([*starts, *COMMAND, f"boxing={boxing}", *sweep], tmp_path, root)

    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [run.name for run in runs] == ["0", "1"]
    assert [len(losses(run)) for run in runs] == [3, 3]
    assert losses(runs[0])[0] == losses(runs[1])[0] and losses(runs[0]) != losses(runs[1])
    if by != "threads":
        first, second = map(settings_of, runs)
        assert len(first) == len(second) == 2
        assert len(set(first)) == len(set(second)) == 1 and first != second
