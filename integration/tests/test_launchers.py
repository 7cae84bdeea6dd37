"""`sbp-train` on real processes: what it computes, what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

SMALL = (
    "model.num_layers=2",
    "model.hidden=16",
    "model.num_heads=2",
    "model.context=16",
    "trainer.steps=3",
    "trainer.batch_size=4",
    "trainer.eval_batches=1",
    "trainer.sample_tokens=2",
    "trainer.log_every=1",
    "cluster.mesh=[2]",
)

DATA = ("planner=manual/zero", "cluster.axes=[data]")
PIPELINE = ("planner=manual/pipeline", "cluster.axes=[pipe]", "trainer.micro_batches=2")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with one thread for each process."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `sbp-train`, by itself."""
    return started([sys.executable, "-m", "sbp_launch.train", *SMALL, *overrides], folder)


def losses(run: Path) -> list[float]:
    """Return the losses of a run, in order."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    ("layout", "between"),
    [
        pytest.param(DATA, ("torch",), id="sharded"),
        pytest.param(DATA, ("mpi",), id="sharded-mpi", marks=pytest.mark.exhaustive),
        pytest.param(PIPELINE, ("torch", "mpi"), id="pipeline", marks=pytest.mark.exhaustive),
    ],
)
def test_processes_compute_what_threads_do_bit_for_bit(
    tmp_path: Path, layout: tuple[str, ...], between: tuple[str, ...]
) -> None:
    runs = {}
    for boxing in ("local", *between):
        where = tmp_path / boxing
        done = train(tmp_path, *layout, f"boxing={boxing}", f"hydra.run.dir={where}")
        assert done.returncode == 0, done.stdout + done.stderr
        runs[boxing] = done.stdout
        if boxing != "local":
            assert "launcher spawn: 2 processes, one a rank" in done.stdout
            assert (where / "logs" / "rank_1.txt").read_text("utf-8")
    assert len(losses(tmp_path / "local")) == 3
    states = load_file(tmp_path / "local" / "states.safetensors")
    for boxing in between:
        assert losses(tmp_path / boxing) == losses(tmp_path / "local")
        found = load_file(tmp_path / boxing / "states.safetensors")
        assert found.keys() == states.keys()
        assert all(found[name].equal(value) for name, value in states.items())
        # What rank 0 prints of losses, held-out loss, sample and deviation.
        own, other = (runs[name].partition("step 1/3")[2] for name in ("local", boxing))
        told = [line for line in own.splitlines() if "held-out" in line or "deviation" in line]
        assert told and all(line in other for line in told)
