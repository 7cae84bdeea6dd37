"""The measured cluster, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import sbp_launch.conf
from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings
from sbp_launch.clusters.local import MeasuredConfig, build_measured

CONF = Path(sbp_launch.conf.__file__).parent / "cluster" / "measured.yaml"
DEVICE = Device(memory_bytes=2**30, flop_per_s={"float32": 1e9}, memory_bytes_per_s=1e9)
LINK = Link(latency_s=1e-4, bytes_per_s=1e9)


def calibration(backend: str) -> Calibration:
    return Calibration.of(
        [
            Measurement(
                backend=backend,
                kind="all-reduce",
                group_size=2,
                shared_bytes=size,
                times_s=(1e-4 + size * 1e-9,),
            )
            for size in (1000, 10_000, 100_000)
        ]
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return the path of a machine of two ranks."""
    cluster = Cluster(
        name="here",
        num_devices=2,
        devices_per_node=2,
        device=DEVICE,
        intra_node=LINK,
        calibrations={name: calibration(name) for name in ("torch", "mpi")},
        backend="torch",
    )
    path = tmp_path / "cluster.json"
    cluster.save(path)
    return str(path)


def test_the_file_says_what_the_cluster_can_do(file: str) -> None:
    cluster = build_measured(MeasuredConfig(file=file))(2)

    assert cluster.num_devices == 2
    assert cluster.device == DEVICE
    assert cluster.intra_node == LINK
    assert cluster.calibration is not None
    assert cluster.calibration.backend == "torch"


def test_the_option_file_states_the_defaults(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    values = OmegaConf.to_container(OmegaConf.load(CONF))
    assert isinstance(values, dict)

    assert values.pop("name") == "measured"
    assert merge_settings(MeasuredConfig, values) == MeasuredConfig()
    assert set(values) == {field.name for field in fields(MeasuredConfig)}


def test_the_config_chooses_among_the_backends_of_a_file(file: str) -> None:
    cluster = build_measured(MeasuredConfig(file=file, backend="mpi"))(2)

    assert cluster.calibration is not None
    assert cluster.calibration.backend == "mpi"


def test_a_backend_that_was_not_measured_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="backend='nccl'") as caught:
        MeasuredConfig(file=file, backend="nccl")

    assert "torch, mpi" in str(caught.value)
    assert "sbp-calibrate boxing=nccl ranks=2" in str(caught.value)


def test_a_mesh_with_fewer_ranks_is_a_part_of_the_machine(file: str) -> None:
    cluster = build_measured(MeasuredConfig(file=file, mesh=(1,)))(1)

    assert (cluster.num_devices, cluster.devices_per_node) == (1, 2)


def test_a_mesh_with_more_ranks_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match=r"mesh=\[2, 2\] has 4 ranks") as caught:
        MeasuredConfig(file=file, mesh=(2, 2), axes=("data", "tensor"))

    assert "extrapolate=true" in str(caught.value)


def test_a_mesh_with_more_ranks_is_guessed_if_that_is_wanted(file: str) -> None:
    config = MeasuredConfig(file=file, mesh=(2, 2), axes=("data", "tensor"), extrapolate=True)

    cluster = build_measured(config)(4)

    assert cluster.num_devices == cluster.devices_per_node == 4
    assert cluster.calibration is not None
    assert (cluster.calibration.time_s("all-reduce", 4, 1, 1000) or 0.0) > 0


def test_more_ranks_of_a_machine_of_nodes_are_more_nodes(file: str) -> None:
    value = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps({**value, "num_devices": 4, "devices_per_node": 2}))

    config = MeasuredConfig(file=file, mesh=(8,), extrapolate=True)

    assert build_measured(config)(8).devices_per_node == 2


def test_a_node_that_is_guessed_larger_has_whole_sockets(file: str) -> None:
    value = json.loads(Path(file).read_text())
    socket = {"name": "socket", "num_ranks": 2, "link": value["intra_node"]}
    of_four = {**value, "num_devices": 4, "devices_per_node": 4, "groups": [socket]}
    Path(file).write_text(json.dumps(of_four))

    cluster = build_measured(MeasuredConfig(file=file, mesh=(5,), extrapolate=True))(5)

    assert (cluster.num_devices, cluster.group_sizes) == (5, (2, 8))


def test_a_mesh_is_checked_as_that_of_any_cluster(file: str) -> None:
    assert MeasuredConfig(file=file, mesh=(1, 2)).axes == ("data", "tensor")
    with pytest.raises(ConfigError, match="names 1 axes for a mesh of 2"):
        MeasuredConfig(file=file, mesh=(1, 2), axes=("data",))
    with pytest.raises(ConfigError, match="world_size=3"):
        MeasuredConfig(file=file, mesh=(2,), world_size=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("{}", "no cluster file"),
        ('{"format": "sbp-cluster", "version": 99}', "its version is 99"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=says):
        MeasuredConfig(file=str(path))
