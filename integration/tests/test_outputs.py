"""Runs and reports on terminals and files that cannot take what is written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import DATA, SMALL, losses
from torch import nn

from sbp_launch import parallelize


def train(folder: Path, shell: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `sbp-train` in a line of a shell, as one whose terminal knows ASCII alone."""
    command = [sys.executable, "-m", "sbp_launch.apps.train", *SMALL, *DATA, *arguments]
    return subprocess.run(
        ["bash", "-c", shell, "bash", *command],
        cwd=folder,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ('"$@"', ""),
        pytest.param(
            '"$@" >/dev/full', "No space left on device; the work", marks=pytest.mark.slow
        ),
        pytest.param('"$@" >&-', "", marks=pytest.mark.slow),
        pytest.param(
            '"$@" | head -1', "Broken pipe; the command continues", marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_whole_whatever_becomes_of_its_output(
    shell: str, says: str, tmp_path: Path
) -> None:
    done = train(tmp_path, shell, "hydra.run.dir=run")

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    assert len(losses(tmp_path / "run")) == 3
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir()


@pytest.mark.slow
def test_processes_of_a_run_write_where_signs_are_lacking(tmp_path: Path) -> None:
    done = train(tmp_path, '"$@"', "hydra.run.dir=run", "launcher=spawn", "boxing=torch")

    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 3
    done.stdout.encode("ascii")


def test_a_report_is_drawn_with_what_a_stream_has() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = parallelize(
        model, lambda m, b: m(b).square().mean(), torch.ones(4, 4), optimizer, mesh=2
    )
    written = io.BytesIO()

    with io.TextIOWrapper(written, encoding="ascii", write_through=True) as stream:
        step.report(stream)
        text = written.getvalue().decode()

    assert "---" in text
    assert "predicted time of a step" in text
