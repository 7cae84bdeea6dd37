"""The declared cluster, and the meshes that it refuses."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import ConfigError
from sbp_launch.clusters.local import LocalConfig, build_local

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(derandomize=True, max_examples=60)
@given(MESHES, st.integers(1, 64))
def test_a_mesh_fits_exactly_the_world_that_it_fills(mesh: list[int], world: int) -> None:
    axes = tuple(f"a{index}" for index in range(len(mesh)))

    if prod(mesh) == world:
        assert LocalConfig(mesh=tuple(mesh), axes=axes, world_size=world).world_size == world
    else:
        with pytest.raises(ConfigError, match=f"world_size={world}"):
            LocalConfig(mesh=tuple(mesh), axes=axes, world_size=world)


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [((), ()), ((0, 2), ("a", "b")), ((-1,), ("a",)), ((2,), ("a", "b")), ((2, 2), ("a", "a"))],
)
def test_a_mesh_that_cannot_be_meant_is_refused(mesh: tuple[int, ...], axes: tuple[str]) -> None:
    with pytest.raises(ConfigError):
        LocalConfig(mesh=mesh, axes=axes)


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ((4,), ("data",)),
        ((2, 2), ("data", "tensor")),
        ((2, 1, 2), ("pipe", "data", "tensor")),
    ],
)
def test_axes_have_names_unless_they_are_given_others(
    mesh: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    others = tuple(f"mine_{axis}" for axis in axes)

    assert LocalConfig(mesh=mesh).axes == axes
    assert LocalConfig(mesh=mesh, axes=others).axes == others


def test_four_axes_need_names() -> None:
    with pytest.raises(ConfigError, match="axes=null"):
        LocalConfig(mesh=(1, 1, 1, 1))


@pytest.mark.parametrize(
    "name",
    [
        "float32_flop_per_s",
        "float64_flop_per_s",
        "memory_bytes",
        "memory_bytes_per_s",
        "link_bytes_per_s",
    ],
)
def test_rates_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LocalConfig(**{name: 0})


@pytest.mark.parametrize("name", ["launch_s", "link_latency_s"])
def test_latencies_may_be_zero_but_not_negative(name: str) -> None:
    assert getattr(LocalConfig(**{name: 0.0}), name) == 0
    with pytest.raises(ConfigError, match=name):
        LocalConfig(**{name: -1e-6})


def test_the_cluster_is_one_node_with_the_declared_rates() -> None:
    config = LocalConfig(cores=4, float32_flop_per_s=3e9, memory_bytes=1000, link_latency_s=1.5)

    cluster = build_local(config)(4)

    assert (cluster.num_devices, cluster.devices_per_node) == (4, 4)
    assert cluster.device.flop_per_s["float32"] == 3e9
    assert cluster.device.memory_bytes == 1000
    assert cluster.link([0, 3]).latency_s == 1.5


def test_ranks_share_the_cores_and_wait_for_one_interpreter() -> None:
    config = LocalConfig(cores=2, float32_flop_per_s=3e9, memory_bytes_per_s=8e9, launch_s=1e-6)
    make = build_local(config)

    many, few = make(8).device, make(2).device

    assert (many.flop_per_s["float32"], many.memory_bytes_per_s) == (3e9 / 4, 2e9)
    assert (few.flop_per_s["float32"], few.memory_bytes_per_s) == (3e9, 8e9)
    assert (many.launch_s, few.launch_s) == (8e-6, 2e-6)


def test_gpus_share_nothing_and_have_rates_of_their_own() -> None:
    make = build_local(LocalConfig(device="cuda", cores=1, launch_s=1e-6))

    many, one = make(8).device, make(1).device

    assert many == one
    assert (many.kind, many.launch_s) == ("cuda", 1e-6)
    assert many.flop_per_s["bfloat16"] > many.flop_per_s["float32"] > 1e13


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='tpu'"):
        LocalConfig(device="tpu")  # type: ignore[arg-type] # what a config may say


def test_there_is_at_least_one_core() -> None:
    assert build_local(LocalConfig())(1).device.flop_per_s["float32"] == 100e9
    with pytest.raises(ConfigError, match="cores=0"):
        LocalConfig(cores=0)


def test_a_local_machine_has_host_memory_where_it_is_given_some() -> None:
    without = build_local(LocalConfig(mesh=(2,)))(2).device
    beside = build_local(LocalConfig(mesh=(2,), host_memory_bytes=10**9))(2).device
    gpu = build_local(
        LocalConfig(mesh=(2,), device="cuda", host_memory_bytes=10**9, host_link_bytes_per_s=5e10)
    )(2).device

    assert without.host_memory_bytes is None and without.host_link is None
    assert beside.host_memory_bytes == 10**9
    assert beside.host_link is not None and beside.host_link.bytes_per_s == 5e9
    assert gpu.host_link is not None and gpu.host_link.bytes_per_s == 5e10
    with pytest.raises(ConfigError, match="host_memory_bytes=0"):
        LocalConfig(mesh=(2,), host_memory_bytes=0)
