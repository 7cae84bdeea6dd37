"""The cluster profiles `local`, this machine with declared rates, and `measured`, a measured one.

`measured` reads the rates from a file that `sbp-calibrate` has written. Plans are priced with these
rates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Literal

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.errors import ConfigError
from sbp_core.plugins import INSTEAD, ClusterFactory
from sbp_launch.checks import check_least

#: Advice in the message about a mesh that is not a list.
MESH_TODO = "give the ranks along each axis: cluster.mesh=[4], or 'cluster.mesh=[2, 2]'"

#: Default names of the axes of a mesh with one, two or three axes; presets of planners use them.
AXES = {1: ("data",), 2: ("data", "tensor"), 3: ("pipe", "data", "tensor")}


#: Default rates of `LocalConfig` by kind of device. For CPUs, orders of magnitude for one core of a
#: server. For GPUs, an NVIDIA A100 SXM 80 GB with NVLink and PCIe in one direction; matrix products
#: of float32 without TF32. Source: NVIDIA A100 datasheet, June 2021; latencies and launches are
#: usual orders of magnitude.
RATES: Mapping[str, Mapping[str, float]] = {
    "cpu": {
        "float32_flop_per_s": 100e9,
        "float64_flop_per_s": 50e9,
        "bfloat16_flop_per_s": 50e9,
        "memory_bytes": 4 * 2**30,
        "memory_bytes_per_s": 10e9,
        "launch_s": 7e-6,
        "boxing_launch_s": 1.5e-4,
        "link_latency_s": 2e-5,
        "link_bytes_per_s": 5e9,
        "host_link_bytes_per_s": 5e9,
    },
    "cuda": {
        "float32_flop_per_s": 19.5e12,
        "float64_flop_per_s": 9.7e12,
        "bfloat16_flop_per_s": 312e12,
        "memory_bytes": 80 * 10**9,
        "memory_bytes_per_s": 2.039e12,
        "launch_s": 5e-6,
        "boxing_launch_s": 2e-5,
        "link_latency_s": 1e-5,
        "link_bytes_per_s": 300e9,
        "host_link_bytes_per_s": 32e9,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """A mesh of ranks on this machine: they share its cores, or have a GPU each.

    The rates are declared, not measured. If there are more ranks than cores, each gets its share of
    them. Python starts the work of all threads of a process one after the other, so on CPUs each
    rank also waits while operators and boxing steps of other ranks start.

    Args:
        mesh: Ranks along each axis, >= 1; -1 for one axis: as many as the launcher has started.
        axes: Distinct name of each axis; None for the names in `AXES`.
        device: Kind of device of every rank.
        world_size: Total number of ranks; None for the size of the mesh.
        cores: Cores that the ranks share; None for all that this process may use.
        float32_flop_per_s: Rate of a float32 matrix multiplication on one core or GPU, in flop/s;
            None, here and below, for the value in `RATES`.
        float64_flop_per_s: The same in float64.
        bfloat16_flop_per_s: The same in bfloat16 and float16.
        memory_bytes: Memory of one rank that a plan may use, in bytes.
        memory_bytes_per_s: Memory bandwidth of one core or GPU, in bytes/s.
        launch_s: Time to start one operator of one rank, in seconds.
        boxing_launch_s: Time to start one boxing step on one rank, without its messages, in
            seconds.
        link_latency_s: Latency of a message between two ranks, in seconds.
        link_bytes_per_s: Bandwidth between two ranks, in bytes/s.
        host_memory_bytes: Host memory, in addition to that of the device, to which states of one
            rank may be offloaded, in bytes; None for none. On CPUs it is part of the same memory.
        host_link_bytes_per_s: Bandwidth between a device and that memory in each direction, in
            bytes/s; its latency is `link_latency_s`.
    """

    mesh: tuple[int, ...] = field(default=(2, 2), metadata={INSTEAD: MESH_TODO})
    axes: tuple[str, ...] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    world_size: int | None = None
    cores: int | None = None
    float32_flop_per_s: float | None = None
    float64_flop_per_s: float | None = None
    bfloat16_flop_per_s: float | None = None
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    launch_s: float | None = None
    boxing_launch_s: float | None = None
    link_latency_s: float | None = None
    link_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    host_link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", named_axes(self.mesh, self.axes, self.world_size))
        if self.device not in RATES:
            raise ConfigError(f"device={self.device!r}", accepted=" or ".join(RATES))
        accepted = "1 or more, or null for all cores of the process"
        check_least(self, 1, "cores", accepted=accepted, why="")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None:
                continue
            if entry.name in ("launch_s", "boxing_launch_s", "link_latency_s"):
                if not 0 <= value < inf:
                    raise ConfigError(f"{entry.name}={value!r}", accepted="seconds >= 0")
            elif entry.name.endswith(("bytes", "per_s")) and not 0 < value < inf:
                raise ConfigError(f"{entry.name}={value!r}", accepted="a finite number > 0")


def named_axes(
    mesh: tuple[int, ...], axes: tuple[str, ...] | None, world_size: int | None
) -> tuple[str, ...]:
    """Return the name of each axis; check names, mesh and number of ranks against each other.

    Args:
        mesh: Ranks along each axis.
        axes: Their names; None for the names in `AXES`.
        world_size: Total number of ranks; None for the size of the mesh.

    Raises:
        ConfigError: they do not fit; the message starts with the wrong setting.
    """
    shown = list(mesh)
    if -1 in mesh:
        raise ConfigError(
            f"mesh={shown} takes the length of an axis from the launcher, and no launcher has "
            "started this process",
            accepted="one -1, under torchrun, mpiexec or srun; or the ranks along each axis",
        )
    if not mesh or min(mesh) < 1:
        raise ConfigError(
            f"mesh={shown} has no ranks",
            accepted="at least one axis, each of one rank or more, such as [2, 2]",
        )
    if axes is None and len(mesh) not in AXES:
        raise ConfigError(
            f"axes=null, and mesh={shown} has {len(mesh)} axes",
            accepted=f"one name for each axis; null for a mesh of at most {max(AXES)} axes",
            todo="set cluster.axes, such as cluster.axes=[pipe,node,data,tensor]",
        )
    axes = AXES[len(mesh)] if axes is None else axes
    if len(axes) != len(mesh):
        usual = ", or null for " + ",".join(AXES[len(mesh)]) if len(mesh) in AXES else ""
        raise ConfigError(
            f"axes={list(axes)} names {len(axes)} axes for a mesh of {len(mesh)}: mesh={shown}",
            accepted=f"one name for each axis of the mesh{usual}",
            todo="set cluster.mesh and cluster.axes together",
        )
    if len(set(axes)) != len(axes) or not all(axes):
        raise ConfigError(f"axes={list(axes)} repeats a name", accepted="distinct names")
    if world_size is not None and prod(mesh) != world_size:
        raise ConfigError(
            f"mesh={shown} has {prod(mesh)} ranks, and world_size={world_size}",
            accepted=f"a mesh of {world_size} ranks, or world_size={prod(mesh)}",
        )
    return axes


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build_local(config: LocalConfig) -> ClusterFactory:
    """Return a function from a number of ranks to the declared cluster, which is one node."""
    cores = config.cores or usable_cores()
    given = {name: getattr(config, name) for name in RATES[config.device]}
    rates = {**RATES[config.device], **{k: v for k, v in given.items() if v is not None}}
    link = Link(latency_s=rates["link_latency_s"], bytes_per_s=rates["link_bytes_per_s"])
    host_link = replace(link, bytes_per_s=rates["host_link_bytes_per_s"])
    host_bytes = None if config.host_memory_bytes is None else int(config.host_memory_bytes)

    def make(num_devices: int) -> Cluster:
        # Ranks on CPUs share cores, and an interpreter that starts one operator at a time.
        on_cpu = config.device == "cpu"
        share = min(1.0, cores / num_devices) if on_cpu else 1.0
        waiting = num_devices if on_cpu else 1
        half = share * rates["bfloat16_flop_per_s"]
        device = Device(
            kind=config.device,
            memory_bytes=int(rates["memory_bytes"]),
            flop_per_s={
                "float32": share * rates["float32_flop_per_s"],
                "float64": share * rates["float64_flop_per_s"],
                "bfloat16": half,
                "float16": half,
            },
            memory_bytes_per_s=share * rates["memory_bytes_per_s"],
            launch_s=waiting * rates["launch_s"],
            boxing_launch_s=waiting * rates["boxing_launch_s"],
            host_memory_bytes=host_bytes,
            host_link=None if host_bytes is None else host_link,
        )
        return Cluster(
            name="local",
            num_devices=num_devices,
            devices_per_node=num_devices,
            device=device,
            intra_node=link,
            inter_node=link,
        )

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig:
    """A mesh of ranks on a machine whose rates are in a cluster file.

    Args:
        file: Cluster file that `sbp-calibrate` wrote.
        mesh: Ranks along each axis, >= 1; -1 for one axis: as many as the launcher has started.
        axes: Distinct name of each axis; None for the names in `sbp_launch.clusters.local.AXES`.
        world_size: Total number of ranks; None for the size of the mesh.
        backend: Boxing backend whose times are used; empty for the default of the file.
        extrapolate: Whether the mesh may have more ranks than were measured. They are assumed to be
            as fast, and large groups are predicted from smaller ones.

    Raises:
        ConfigError: the mesh is invalid, or the file cannot be read or lacks data.
    """

    file: str = "cluster.json"
    mesh: tuple[int, ...] = field(default=(2,), metadata={INSTEAD: MESH_TODO})
    axes: tuple[str, ...] | None = None
    world_size: int | None = None
    backend: str = ""
    extrapolate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", named_axes(self.mesh, self.axes, self.world_size))
        load(self, prod(self.mesh))


def load(config: MeasuredConfig, num_devices: int) -> Cluster:
    """Return the measured machine, with the number of ranks of a mesh.

    Raises:
        ConfigError: the file cannot be read, lacks the backend, or has too few ranks.
    """
    cluster = Cluster.load(Path(config.file))
    if config.backend and config.backend not in cluster.calibrations:
        raise ConfigError(
            f"backend={config.backend!r} is not in file={config.file!r}",
            accepted=", ".join(cluster.calibrations) or "none: only one rank was measured",
            todo=f"sbp-calibrate boxing={config.backend} ranks={cluster.num_devices} "
            f"out={config.file}",
        )
    if num_devices > cluster.num_devices and not config.extrapolate:
        raise ConfigError(
            f"mesh={list(config.mesh)} has {_ranks(num_devices)}, and file={config.file!r} was "
            f"measured with {cluster.num_devices}: more ranks share cores, memory and links, and "
            "the effect was not measured",
            accepted=f"a mesh of at most {_ranks(cluster.num_devices)}, or extrapolate=true",
            todo=f"sbp-calibrate boxing={cluster.backend or 'local'} ranks={num_devices} "
            "out=FILE with another file and cluster.file=FILE, or cluster.extrapolate=true for an "
            "estimate",
        )
    per_node = cluster.devices_per_node
    if cluster.num_devices <= per_node == cluster.group_sizes[-1]:
        # Only one node was measured, so nothing is known about others: all ranks are on one node,
        # which is enlarged to a multiple of the measured size, as groups inside it need.
        per_node *= -(-num_devices // per_node)
    backend = config.backend or cluster.backend
    if backend in cluster.calibrations:
        cluster = cluster.priced_by(backend)
    return replace(cluster, num_devices=num_devices, devices_per_node=per_node)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def build_measured(config: MeasuredConfig) -> ClusterFactory:
    """Return a function from a number of ranks to the measured cluster."""
    return partial(load, config)
