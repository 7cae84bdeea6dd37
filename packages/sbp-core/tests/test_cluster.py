"""Cluster files: written, read back, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbp_core.calibration import calibrate
from sbp_core.cluster import CLUSTER, Cluster, Link, LinkLevel
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.testing.files import measured_cluster


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    cluster, path = measured_cluster(), tmp_path / "desk.json"

    cluster.save(path)

    assert Cluster.load(path) == cluster


def test_a_file_has_one_line_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"

    measured_cluster().save(path)

    lines = path.read_text("utf-8").splitlines()
    assert sum("times_s" in line for line in lines) == 12
    assert lines[1:3] == ['  "format": "sbp-cluster",', '  "version": 2,']


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(CLUSTER.dump(measured_cluster())))
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value: value.pop("format"), "no cluster file"),
        (lambda value: value.update(version=1), "version is 1"),
        (lambda value: value.pop("device"), "'device'"),
        (lambda value: value["device"].update(memory_bytes=0), "positive memory"),
        (lambda value: value["device"].update(colour="red"), "colour"),
        (lambda value: value.update(num_devices="many"), "num_devices is 'many'"),
        (lambda value: value["intra_node"].update(bytes_per_s=-1), "bandwidth"),
        (lambda value: value["calibrations"]["torch"].pop("curves"), "'curves'"),
        (
            lambda value: value["calibrations"]["torch"]["samples"][0].update(kind="gossip"),
            "gossip",
        ),
        (lambda value: value["calibrations"].update(mpi=value["calibrations"]["torch"]), "mpi"),
        (lambda value: value.update(calibrations=[]), "calibrations is a list of 0"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_the_reason_and_the_place(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        CLUSTER.load(broken(change), "desk.json")

    assert caught.value.where[0] == "desk.json"


def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"

    with pytest.raises(ConfigError, match="cannot be read") as absent:
        Cluster.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="no JSON") as cut_off:
        Cluster.load(path)

    assert absent.value.where == (str(path),)
    assert cut_off.value.where == (f"{path}, line 1, column 2",)


def test_the_only_calibration_prices_unless_another_backend_is_meant() -> None:
    cluster = measured_cluster()
    fields = {field: getattr(cluster, field) for field in cluster.__dataclass_fields__}

    assert Cluster(**(fields | {"backend": ""})).calibration is cluster.calibrations["torch"]
    assert Cluster(**(fields | {"backend": "mpi"})).calibration is None
    assert Cluster(**(fields | {"calibrations": {}})).calibration is None


def test_a_calibration_under_another_name_is_refused() -> None:
    cluster = measured_cluster()
    fields = {field: getattr(cluster, field) for field in cluster.__dataclass_fields__}

    with pytest.raises(SbpValueError, match="by the name of their backend"):
        Cluster(**(fields | {"calibrations": {"mpi": cluster.calibrations["torch"]}}))


def test_a_backend_brings_the_launches_that_were_measured_beside_it() -> None:
    desk = measured_cluster()
    mpi = calibrate([replace(s, backend="mpi") for s in desk.calibrations["torch"].samples])
    mpi = replace(mpi, launch_s=3e-6, boxing_launch_s=4e-5)
    both = replace(desk, calibrations={**desk.calibrations, "mpi": mpi})

    by_mpi, by_torch = both.priced_by("mpi"), both.priced_by("torch")

    assert (by_mpi.device.launch_s, by_mpi.device.boxing_launch_s) == (3e-6, 4e-5)
    assert by_mpi.calibration is mpi
    assert by_torch.device == desk.device  # no step was measured beside torch


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_launches_are_times(wrong: float) -> None:
    desk = measured_cluster()

    with pytest.raises(SbpValueError, match="seconds >= 0"):
        replace(desk.calibrations["torch"], boxing_launch_s=wrong)
    with pytest.raises(SbpValueError, match="boxing_launch_s from 0 on"):
        replace(desk.device, boxing_launch_s=-1.0)


LINK = Link(latency_s=1e-5, bytes_per_s=1e8)


def level(name: str, num_ranks: int, link: Link = LINK) -> LinkLevel:
    return LinkLevel(name=name, num_ranks=num_ranks, link=link, shared=True)


def test_a_tree_without_groups_is_nodes_and_what_links_them() -> None:
    desk = measured_cluster()

    inside, between = desk.levels

    assert (inside.name, inside.num_ranks, inside.shared) == ("node", 2, True)
    assert (between.name, between.num_ranks, between.shared) == ("cluster", 2, False)
    assert (inside.link, between.link) == (desk.intra_node, desk.inter_node)


def test_groups_lie_inside_and_around_nodes() -> None:
    desk = replace(
        measured_cluster(),
        num_devices=32,
        devices_per_node=4,
        groups=(level("socket", 2), level("rack", 8), level("row", 16)),
    )

    names = [(of.name, of.num_ranks) for of in desk.levels]

    assert names == [("socket", 2), ("node", 4), ("rack", 8), ("row", 16), ("cluster", 32)]
    assert desk.group_sizes == (2, 4, 8, 16)
    assert desk.node_level == 1


def test_a_tree_survives_its_file(tmp_path: Path) -> None:
    cluster = replace(measured_cluster(), groups=(level("rack", 4),))
    host = replace(cluster.device, kind="cuda", host_memory_bytes=5, host_link=LINK)
    cluster, path = replace(cluster, device=host), tmp_path / "racks.json"

    cluster.save(path)

    assert Cluster.load(path) == cluster


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((level("rack", 3),), "are not nested"),
        ((level("other", 2),), "are not nested"),
        ((level("row", 8), level("rack", 4)), "are not nested"),
        ((level("rack", 4), level("row", 6)), "are not nested"),
        ((level("rack", 4), level("rack", 8)), "repeat a name"),
        ((level("node", 4),), "repeat a name"),
    ],
)
def test_groups_that_are_no_tree_are_refused(groups: tuple[LinkLevel, ...], says: str) -> None:
    with pytest.raises(SbpValueError, match=says):
        replace(measured_cluster(), groups=groups)


@pytest.mark.parametrize(("name", "num_ranks"), [("", 2), ("rack", 0)])
def test_a_level_has_a_name_and_ranks(name: str, num_ranks: int) -> None:
    with pytest.raises(SbpValueError, match="a name, and groups of 1"):
        level(name, num_ranks)


@pytest.mark.parametrize(
    ("kind", "size_bytes", "link", "says"),
    [
        ("cuda", 5, None, "both, or neither"),
        ("cpu", None, LINK, "both, or neither"),
        ("cuda", 0, LINK, "more than 0 bytes"),
    ],
)
def test_host_memory_lies_behind_a_link(
    kind: str, size_bytes: int | None, link: Link | None, says: str
) -> None:
    device = replace(measured_cluster().device, kind="cuda", host_memory_bytes=7, host_link=LINK)

    assert device.host_memory_bytes == 7
    with pytest.raises(SbpValueError, match=says):
        replace(device, kind=kind, host_memory_bytes=size_bytes, host_link=link)
