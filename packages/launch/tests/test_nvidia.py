"""The profiles of GPU nodes: what data sheets say, what plans count on, and meshes that fit."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import discover
from sbp_launch.clusters import nvidia
from sbp_launch.clusters.nvidia import NODES, GpuConfig, build_h100

PEAKS = {
    "compute_efficiency": 1.0,
    "memory_efficiency": 1.0,
    "link_efficiency": 1.0,
    "memory_fraction": 1.0,
}


def machine(name: str, **settings: object) -> Cluster:
    config = GpuConfig(**settings)  # type: ignore[arg-type] # settings of any kind
    made: Cluster = getattr(nvidia, f"build_{name}")(config)(prod(config.mesh or ()))
    return made


def test_every_profile_is_offered_and_makes_a_cluster_of_its_name() -> None:
    registry = discover()

    for name in NODES:
        config = registry.configure("cluster", name, {"nodes": 2})
        cluster = registry.make("cluster", name, {"nodes": 2})(16)

        assert (config.mesh, config.axes) == ((2, 8), ("data", "tensor"))  # type: ignore[attr-defined]
        assert (cluster.name, cluster.devices_per_node, cluster.device.kind) == (name, 8, "cuda")


@pytest.mark.parametrize("name", [*NODES])
def test_generations_have_grown_and_links_become_slower_outwards(name: str) -> None:
    cluster = machine(name, nodes=2, **PEAKS)
    device, (inside, between) = cluster.device, cluster.levels

    assert device.flop_per_s["float16"] > device.flop_per_s["float32"]
    assert device.memory_bytes_per_s > inside.link.bytes_per_s > between.link.bytes_per_s
    assert inside.link.latency_s < between.link.latency_s
    assert not inside.shared and not between.shared
    assert device.host_link is not None and device.host_memory_bytes is not None
    assert device.host_memory_bytes > device.memory_bytes
    assert device.host_link.bytes_per_s > between.link.bytes_per_s


def test_an_h100_is_what_its_data_sheet_says() -> None:
    cluster = machine("h100", nodes=2, **PEAKS)

    assert cluster.device.memory_bytes == 80 * 10**9
    assert cluster.device.flop_per_s["bfloat16"] == 989.5e12  # 1,979 with sparsity
    assert cluster.device.memory_bytes_per_s == 3.35e12
    assert cluster.intra_node.bytes_per_s == 900e9 / 2
    assert cluster.inter_node.bytes_per_s == 400e9 / 8
    assert cluster.device.host_memory_bytes == 2 * 10**12 // 8


def test_plans_count_on_the_fractions_that_are_set() -> None:
    peak = machine("a100", **PEAKS)
    found = machine(
        "a100",
        compute_efficiency=0.5,
        memory_efficiency=0.25,
        link_efficiency=0.75,
        memory_fraction=0.125,
    )

    assert found.device.flop_per_s == {
        dtype: 0.5 * rate for dtype, rate in peak.device.flop_per_s.items()
    }
    assert found.device.memory_bytes_per_s == 0.25 * peak.device.memory_bytes_per_s
    assert found.intra_node.bytes_per_s == 0.75 * peak.intra_node.bytes_per_s
    assert found.device.memory_bytes == 10 * 10**9
    assert machine("a100", memory_bytes=12345).device.memory_bytes == 12345


def test_tf32_is_for_float32_where_the_gpu_has_it() -> None:
    exact, rounded = (machine("a100", tf32=tf32, **PEAKS).device.flop_per_s for tf32 in (0, 1))

    assert (exact["float32"], rounded["float32"]) == (19.5e12, 156e12)
    assert exact["bfloat16"] == rounded["bfloat16"]
    assert machine("v100", tf32=True) == machine("v100")


def test_racks_are_a_level_whose_uplink_their_nodes_share() -> None:
    cluster = machine("h100", nodes=8, nodes_per_rack=4, rack_oversubscription=2.0, **PEAKS)

    levels = [(level.name, level.num_ranks, level.shared) for level in cluster.levels]

    assert levels == [("node", 8, False), ("rack", 32, False), ("cluster", 64, True)]
    assert cluster.inter_node.bytes_per_s == 4 * 400e9 / 2
    # One GPU alone is as fast as its network card.
    assert cluster.link([0, 63]).bytes_per_s == 50e9


@settings(derandomize=True, max_examples=60)
@given(
    st.integers(1, 16),
    st.integers(1, 8),
    st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple),
)
def test_a_mesh_has_a_rank_for_each_gpu(nodes: int, gpus: int, mesh: tuple[int, ...]) -> None:
    assert prod(GpuConfig(nodes=nodes, gpus_per_node=gpus).mesh or ()) == nodes * gpus
    if prod(mesh) == nodes * gpus:
        assert GpuConfig(nodes=nodes, gpus_per_node=gpus, mesh=mesh).mesh == mesh
    else:
        with pytest.raises(ConfigError, match=rf"{nodes * gpus} GPUs"):
            GpuConfig(nodes=nodes, gpus_per_node=gpus, mesh=mesh)


@pytest.mark.parametrize(
    ("mesh", "todo"),
    [
        ((4, 8), "cluster.nodes=4"),
        ((4,), "cluster.gpus_per_node=4"),
        ((3, 4), "of which 12 is a multiple"),
    ],
)
def test_a_mesh_that_does_not_fit_is_answered_with_settings_that_do(
    mesh: tuple[int, ...], todo: str
) -> None:
    with pytest.raises(ConfigError, match="a rank for each GPU") as caught:
        GpuConfig(mesh=mesh)

    assert todo in caught.value.todo


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"gpus_per_node": 0}, "gpus_per_node=0"),
        ({"nodes_per_rack": 1}, "nodes_per_rack=1"),
        ({"compute_efficiency": 0.0}, "compute_efficiency=0.0"),
        ({"link_efficiency": 1.5}, "link_efficiency=1.5"),
        ({"memory_fraction": float("nan")}, "memory_fraction=nan"),
        ({"launch_s": -1.0}, "launch_s=-1.0"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"nodes_per_rack": 2, "rack_oversubscription": 0.5}, "rack_oversubscription=0.5"),
        ({"rack_oversubscription": 2.0}, "without nodes_per_rack"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GpuConfig(**wrong)  # type: ignore[arg-type] # what a config may say


def test_what_one_gpu_takes_for_operators_is_for_a_plan_on_many(tmp_path: Path) -> None:
    call = "aten.relu.default(float32[2])->float32[2]"
    known = MeasuredOperator(call=call, dtype="float32", flop=2.0, num_bytes=16, time_s=1e-3)
    one = Cluster.nominal(1)
    one = replace(one, device=replace(one.device, kind="cuda", operators=(known,)))
    file = tmp_path / "one.json"
    one.save(file)

    made = build_h100(GpuConfig(nodes=2, operators=str(file)))(16)

    assert made.device.operators == (known,)
    assert made.device.operator_table.measured_s(call) == 1e-3
    assert build_h100(GpuConfig(nodes=2))(16).device.operators == ()


@pytest.mark.parametrize(
    ("kind", "has_some", "what"), [("cpu", True, "measured on a cpu"), ("cuda", False, "has none")]
)
def test_a_file_without_times_of_a_gpu_is_refused(
    tmp_path: Path, kind: str, has_some: bool, what: str
) -> None:
    known = MeasuredOperator(call="x()->y", dtype="float32", flop=2.0, num_bytes=16, time_s=1e-3)
    one = Cluster.nominal(1)
    device = replace(one.device, kind=kind, operators=(known,) if has_some else ())
    file = tmp_path / "one.json"
    replace(one, device=device).save(file)

    with pytest.raises(ConfigError, match=what) as caught:
        GpuConfig(operators=str(file))

    assert "ops=calls.json" in caught.value.todo
