"""`kill -USR1` of a run: each of its ranks writes what it is at, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import DATA, SMALL
from test_launchers import process_of_rank, text_until

from sbp_core.testing.signals import hears_signals

#: Seconds in which ranks that are not stopped are waited for.
PATIENCE_S = 60.0


def wait_for(text: str, path: Path) -> str:
    """Return what a file holds, once there is a text in it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if path.exists() and text in (told := path.read_text("utf-8")):
            return told
        time.sleep(0.02)
    raise AssertionError(f"no {text!r} in {path}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("boxing", "launcher"),
    [("torch", "spawn"), ("torch", "torchrun"), ("mpi", "mpiexec"), ("local", "threads")],
)
@hears_signals()
def test_ranks_say_what_they_are_at_though_one_of_them_hangs(
    tmp_path: Path, boxing: str, launcher: str
) -> None:
    overrides = [*SMALL, *DATA, f"boxing={boxing}", f"launcher={launcher}", "hydra.run.dir=run"]
    overrides[overrides.index("trainer.steps=3")] = "trainer.steps=1000000"
    command = [sys.executable, "-u", "-m", "sbp_launch.apps.train", *overrides]
    logs = tmp_path / "run" / "logs"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        told = text_until(run, b"step 3/")
        assert "step 3/" in told, told
        hanging = 0 if launcher == "threads" else process_of_rank(1, tmp_path)
        if hanging:
            os.kill(hanging, signal.SIGSTOP)
            time.sleep(1.0)  # the other one waits for it by then
        asked_s = time.time()
        run.send_signal(signal.SIGUSR1)
        first = wait_for("stacks:", logs / "status_0.txt")
        took_s = (logs / "status_0.txt").stat().st_mtime - asked_s
        if hanging:
            os.kill(hanging, signal.SIGCONT)
            second = wait_for("rank 1, thread compute: ", logs / "status_1.txt")
            assert "rank 0, thread" not in second
        run.send_signal(signal.SIGTERM)
        told += run.communicate(timeout=240)[0].decode()

    assert run.returncode == 143, told
    assert "rank 0, thread compute: " in first and "  registers: " in first
    if hanging:
        assert "  is in boxing: " in first or "between steps" in first
    else:
        assert "rank 1, thread compute: " in first
    assert f"the state of its ranks: {logs / 'status_0.txt'}" in told
    print(f"{launcher}: written after {took_s:.2f} s")
