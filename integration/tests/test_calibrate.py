"""`sbp-calibrate` through the backends of processes, and a plan that is priced with its file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sbp_core.calibration import Calibration, Measurement
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
    run(folder, "sbp_launch.calibrate.command", *tiny, *arguments)
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


@pytest.mark.exhaustive
def test_a_plan_is_priced_with_the_operators_of_a_traced_run(tmp_path: Path) -> None:
    """Of the actor runtime, whose steps have each operator once."""
    small = ["model.num_layers=1", "model.hidden=32", "model.num_heads=2", "trainer.plan_rows=1"]
    plan = ["planner=manual/data_parallel", "cluster=measured", "cluster.file=cluster.json", *small]
    sample = Measurement(
        backend="local", kind="all-reduce", group_size=2, shared_bytes=1000, times_s=(1e-9,)
    )
    machine = replace(
        Cluster.nominal(2),
        calibrations={"local": Calibration.of([sample])},
        backend="local",
    )
    machine.save(tmp_path / "cluster.json")
    before = run(tmp_path, "sbp_launch.apps.plan", *plan)
    steps = ["trainer.steps=6", "trainer.trace=3..6", "trainer.trace_operators=true"]
    quiet = ["trainer.sample_tokens=0", "trainer.compare_steps=0", "hydra.run.dir=traced"]

    run(tmp_path, "sbp_launch.apps.train", *plan, *steps, *quiet)
    found = json.loads((tmp_path / "traced" / "operators.json").read_text("utf-8"))
    replace(machine, machine=found["machine"]).save(tmp_path / "cluster.json")
    run(tmp_path, "sbp_launch.calibrate.command", "ops=traced")

    operators = Cluster.load(tmp_path / "cluster.json").calibrations["local"].operators
    assert {"aten.addmm.default", "aten.native_layer_norm.default"} <= {one.op for one in operators}
    after = run(tmp_path, "sbp_launch.apps.plan", *plan)
    predicted = re.compile(r"predicted time of a step: (.*)")
    assert predicted.findall(before) != predicted.findall(after)
