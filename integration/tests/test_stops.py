"""A real run that is stopped by a signal: its exit code, what it says, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import saved_states

from sbp_core.testing.signals import hears_signals

SMALL = (
    "model.num_layers=1",
    "model.hidden=32",
    "model.num_heads=2",
    "model.context=16",
    "trainer.batch_size=4",
    "trainer.plan_rows=0",
    "trainer.log_every=1",
    "trainer.steps=1000000",
    "hydra.run.dir=run",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "stopped early; the states so far are in checkpoints/step-"),
        (signal.SIGTERM, 143, "stopped by SIGTERM; the states so far are in checkpoints/step-"),
        # As SIGTERM, as the tests of sbp-launch see in one process.
        pytest.param(
            signal.SIGHUP,
            129,
            "stopped by SIGHUP; the states so far are in checkpoints/step-",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["ctrl-c", "sigterm", "sighup"],
)
@hears_signals()
def test_a_run_stopped_by_a_signal_keeps_its_states(
    tmp_path: Path, number: int, code: int, says: str
) -> None:
    command = [sys.executable, "-u", "-m", "sbp_launch.apps.train", *SMALL]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None, "it was asked for"
        text = b""
        while b"step 3/" not in text and (new := os.read(run.stdout.fileno(), 2**16)):
            text += new
        run.send_signal(number)
        text += run.communicate(timeout=240)[0]

    told = text.decode()
    # Python ends itself by SIGINT where Ctrl-C came under `exec`; to a shell that is 130, too.
    assert run.returncode in (code, -number if number == signal.SIGINT else code), told
    assert says in told
    assert "Traceback" not in told
    assert f"run folder: {tmp_path / 'run'}" in told
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    states = saved_states(tmp_path / "run")
    # Ctrl-C may come between a step and its metrics.
    assert states["head.weight.step"].item() - json.loads(metrics[-1])["step"] in (0, 1)
