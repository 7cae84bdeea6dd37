"""`sbp-calibrate` through the backends of processes, and a plan that is priced with its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sbp_core.cluster import Cluster


def run(folder: Path, module: str, *arguments: str) -> str:
    """Run an app in a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def calibrate(folder: Path, *arguments: str) -> Cluster:
    tiny = ["sizes=[1024,8192,65536]", "repetitions=2", "time_s=1"]
    run(folder, "sbp_launch.calibrate.app", *tiny, *arguments)
    return Cluster.load(folder / "cluster.json")


@pytest.mark.exhaustive  # 30 s; packages/launch tests each part of it
def test_a_plan_is_priced_with_what_was_measured_through_torch(tmp_path: Path) -> None:
    cluster = calibrate(tmp_path, "boxing=torch")
    plan = ["cluster=measured", "planner=manual/data_parallel", "trainer.plan_rows=1"]
    plan += ["model.num_layers=1", "model.hidden=32", "model.num_heads=2"]

    said = run(tmp_path, "sbp_launch.apps.plan", *plan, "cluster.file=cluster.json")

    assert cluster.calibration is not None
    assert cluster.calibration.backend == "torch"
    # Sizes are left out where the machine is too busy for the time given, and no collective is.
    kinds = {str(sample.kind) for sample in cluster.calibration.samples}
    assert kinds == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "transfer"}
    assert "predicted time of a step" in said


@pytest.mark.exhaustive
def test_a_file_holds_the_calibrations_of_several_backends(tmp_path: Path) -> None:
    calibrate(tmp_path, "boxing=local")

    cluster = calibrate(tmp_path, "boxing=mpi")

    assert set(cluster.calibrations) == {"local", "mpi"}
    assert cluster.backend == "mpi"
