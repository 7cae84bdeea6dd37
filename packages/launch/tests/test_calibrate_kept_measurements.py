"""What a calibration keeps of the file that it writes to, and which files it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import discover
from sbp_launch.calibrate.calibration_config import CalibrateRun, check_calibrate
from sbp_launch.calibrate.kept_measurements import KeptMeasurements
from sbp_launch.machine import describe_machine
from sbp_launch.settings.config import ComposedConfig

OPERATORS = (
    MeasuredOperator(
        call="aten.relu.default(float32[2])->float32[2]",
        dtype="float32",
        flop=2.0,
        num_bytes=16,
        time_s=1e-6,
    ),
)


def calibration(backend: str) -> Calibration:
    sample = Measurement(
        backend=backend, kind="all-reduce", group_size=2, shared_bytes=1000, times_s=(1e-4,)
    )
    return Calibration.of([sample, replace(sample, shared_bytes=10_000)])


def machine() -> Cluster:
    """Return a cluster of two ranks of this machine, measured through two backends."""
    return replace(
        Cluster.nominal(2),
        calibrations={
            "local": replace(calibration("local"), operators=OPERATORS),
            "mpi": calibration("mpi"),
        },
        backend="mpi",
        machine=describe_machine("1.0"),
    )


def check(path: Path, **settings: Any) -> CalibrateRun:
    values = {"boxing": {"name": "local"}, "runtime": {"name": "reference"}, "out": str(path)}
    composed = ComposedConfig(values={**values, **settings}, files={}, overrides=())
    return check_calibrate(composed, discover())


def test_times_of_other_backends_and_of_operators_are_kept(tmp_path: Path) -> None:
    machine().save(tmp_path / "here.json")

    run = check(tmp_path / "here.json")

    assert dict(run.kept.calibrations) == {"mpi": calibration("mpi")}
    assert run.kept.operators == OPERATORS


def test_nothing_is_kept_where_there_is_no_file_or_it_may_be_lost(tmp_path: Path) -> None:
    machine().save(tmp_path / "here.json")

    assert check(tmp_path / "new.json").kept == KeptMeasurements()
    assert check(tmp_path / "here.json", overwrite=True, ranks=1).kept == KeptMeasurements()


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (replace(machine(), num_devices=4), "measured with ranks=4, and ranks=2"),
        (
            replace(machine(), machine={**describe_machine("1.0"), "cores": "1000"}),
            "on another machine, with cores '1000'",
        ),
        (Cluster.nominal(2), "on another machine, with processor '?'"),
        (None, "no cluster file"),
    ],
)
def test_a_file_whose_times_cannot_stay_is_refused_and_left_alone(
    tmp_path: Path, cluster: Cluster | None, says: str
) -> None:
    path = tmp_path / "old.json"
    path.write_text("{}")
    if cluster is not None:
        cluster.save(path)
    before = path.read_bytes()

    with pytest.raises(ConfigError, match=says) as caught:
        check(path)

    assert "out=FILE" in caught.value.todo
    assert "overwrite=true" in caught.value.todo
    assert path.read_bytes() == before
    assert check(path, overwrite=True).kept == KeptMeasurements()
