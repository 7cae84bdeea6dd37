"""Describe clusters of NVIDIA GPUs to planners, from data sheets: `v100`, `a100`, ..., `b200`.

So `sbp-plan cluster=h100` plans on any machine. The numbers of `NODES` are peaks, as NVIDIA
publishes them; `GpuConfig` sets the fraction of them that plans assume.

The tree of links: inside a node, each GPU has its own NVLink to a switch. Between nodes, each GPU
has its own network card (or an even share of the node's cards), in a network without contention.
With `nodes_per_rack`, there are racks whose nodes share an uplink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf, prod
from pathlib import Path

from sbp_core.cluster import Cluster, Device, Link, LinkLevel
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import INSTEAD, ClusterFactory
from sbp_launch.checks import check_least
from sbp_launch.clusters.local import MESH_TODO, RATES, named_axes

#: Latency of one message of a ring over NVLink, PCIe and the network, in seconds. Source: NCCL
#: 2.18, `src/graph/tuning.cc`, `hwLat`, ring with protocol Simple, which large messages take.
NVLINK_LATENCY_S = 3.4e-6
PCIE_LATENCY_S = 5.7e-6
NETWORK_LATENCY_S = 14e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """Data sheet of a node of 8 GPUs; rates are peaks, dense, and of one direction.

    Args:
        memory_bytes: Memory of one GPU.
        flop_per_s: Rate of matrix multiplication by dtype, on tensor cores if the GPU has them for
            the dtype; float32 without TF32.
        tf32_flop_per_s: Rate of float32 with TF32; None for a GPU that lacks it.
        memory_bytes_per_s: Memory bandwidth of one GPU.
        nvlink_bytes_per_s: Bandwidth of one GPU to all other GPUs of the node together.
        network_bytes_per_s: Bandwidth of the network cards, per GPU.
        pcie_bytes_per_s: Bandwidth of the slot of one GPU, to the host.
        host_memory_bytes: Host memory of the node.
    """

    memory_bytes: int
    flop_per_s: Mapping[str, float]
    tf32_flop_per_s: float | None
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    pcie_bytes_per_s: float
    host_memory_bytes: int


def _rates(float32: float, float64: float, half: float) -> dict[str, float]:
    return {"float32": float32, "float64": float64, "bfloat16": half, "float16": half}


#: NVIDIA H100 Tensor Core GPU data sheet, 2024, H100 SXM: 80 GB, 3.35 TB/s; FP64 tensor core 67,
#: FP32 67, TF32 989, BFLOAT16 and FP16 1,979 teraFLOPS, the last three with sparsity, which
#: doubles them; NVLink 900 GB/s and PCIe Gen5 128 GB/s, both directions together.
#: NVIDIA DGX H100 data sheet: 2 TB of system memory, 8 ConnectX-7 of 400 Gb/s next to 8 GPUs.
_H100 = GpuNode(
    memory_bytes=80 * 10**9,
    flop_per_s=_rates(67e12, 67e12, 989.5e12),
    tf32_flop_per_s=494.5e12,
    memory_bytes_per_s=3.35e12,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=64e9,
    host_memory_bytes=2 * 10**12,
)

#: Nodes by the name of the profile.
NODES: Mapping[str, GpuNode] = {
    # NVIDIA V100 Tensor Core GPU data sheet, January 2020, V100 SXM2 32 GB: 900 GB/s; double
    # precision 7.8, single 15.7, tensor performance (float16) 125 teraFLOPS; interconnect NVLink
    # 300 GB/s, PCIe Gen3 32 GB/s, both directions together. It computes bfloat16 as float32.
    # NVIDIA DGX-1 with Tesla V100 data sheet: 512 GB of system memory, 4 EDR InfiniBand ports of
    # 100 Gb/s for 8 GPUs. Its NVLinks make a cube: a ring over all GPUs has the whole bandwidth,
    # one pair of them a part of it.
    "v100": GpuNode(
        memory_bytes=32 * 10**9,
        flop_per_s=_rates(15.7e12, 7.8e12, 125e12) | {"bfloat16": 15.7e12},
        tf32_flop_per_s=None,
        memory_bytes_per_s=0.9e12,
        nvlink_bytes_per_s=150e9,
        network_bytes_per_s=6.25e9,
        pcie_bytes_per_s=16e9,
        host_memory_bytes=512 * 10**9,
    ),
    # NVIDIA A100 Tensor Core GPU data sheet, June 2021, A100 80GB SXM: 2,039 GB/s; FP64 tensor
    # core 19.5, FP32 19.5, TF32 156, BFLOAT16 and FP16 312 teraFLOPS, dense; NVLink 600 GB/s, PCIe
    # Gen4 64 GB/s, both directions together.
    # NVIDIA DGX A100 (640 GB) data sheet: 2 TB of system memory, 8 ConnectX-6 of 200 Gb/s.
    "a100": GpuNode(
        memory_bytes=80 * 10**9,
        flop_per_s=_rates(19.5e12, 19.5e12, 312e12),
        tf32_flop_per_s=156e12,
        memory_bytes_per_s=2.039e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        pcie_bytes_per_s=32e9,
        host_memory_bytes=2 * 10**12,
    ),
    "h100": _H100,
    # NVIDIA H200 Tensor Core GPU data sheet, 2024, H200 SXM: 141 GB, 4.8 TB/s; all else as H100.
    # NVIDIA DGX H200 data sheet: as DGX H100.
    "h200": replace(_H100, memory_bytes=141 * 10**9, memory_bytes_per_s=4.8e12),
    # NVIDIA Blackwell Architecture Technical Brief, 2024, HGX B200, by GPU: FP64 tensor core 40,
    # FP32 80, TF32 2,200 and BF16 and FP16 4,500 teraFLOPS, the last three with sparsity.
    # NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s in 8 GPUs, NVLink 14.4 TB/s in 8 GPUs and
    # both directions, 2 TB of system memory, 8 ConnectX-7 of 400 Gb/s; PCIe Gen5.
    "b200": GpuNode(
        memory_bytes=180 * 10**9,
        flop_per_s=_rates(80e12, 40e12, 2250e12),
        tf32_flop_per_s=1100e12,
        memory_bytes_per_s=8e12,
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        pcie_bytes_per_s=64e9,
        host_memory_bytes=2 * 10**12,
    ),
}

#: Number of GPUs of the nodes in `NODES`.
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """Nodes of GPUs, the mesh of ranks over them, and the assumed fractions of their peaks.

    No program reaches the peaks of a data sheet. The defaults of the fractions are:

    * `compute_efficiency`: a rule of thumb for large matrix products of cuBLAS, not measured here.
    * `memory_efficiency`: a rule of thumb for operators that read and write memory.
    * `link_efficiency`: the protocol of NCCL takes about 20 %: of 450 GB/s 370 are reached. Source:
      S. Jeaugey, github.com/NVIDIA/nccl-tests, issue 212, 2024.
    * `memory_fraction`: the rest is for the CUDA context, the buffers of NCCL, the workspaces of
      cuBLAS, and fragmentation of the allocator; a rule of thumb.

    Args:
        nodes: Nodes, >= 1.
        gpus_per_node: GPUs of one node, >= 1; each has the network card and the part of the host's
            memory that it has in a node of 8.
        nodes_per_rack: Nodes, >= 2, that share an uplink; None: a network without contention.
        rack_oversubscription: Bandwidth of the network cards of a rack, divided by the bandwidth of
            its uplink, >= 1.
        mesh: Ranks along each axis, as many as GPUs; None for [nodes, gpus_per_node], or
            [gpus_per_node] if there is one node.
        axes: Distinct name of each axis; None for the names in `sbp_launch.clusters.local.AXES`.
        tf32: Whether products of float32 may be computed in TF32, as with
            `torch.set_float32_matmul_precision("high")`.
        compute_efficiency: Reached fraction of the peak of matrix products, > 0, <= 1.
        memory_efficiency: Reached fraction of the bandwidth of the GPU's memory, > 0, <= 1.
        link_efficiency: Reached fraction of the bandwidth of NVLink, network and PCIe, > 0, <= 1.
        memory_fraction: Fraction of the GPU's memory that a plan may use, > 0, <= 1.
        memory_bytes: Bytes of it that a plan may use, > 0; None for that fraction of it.
        launch_s: Time to start one operator, in seconds.
        boxing_launch_s: Time to start one boxing step on one rank, without its messages, in
            seconds.
        operators: Cluster file of one or more such GPUs, to which `sbp-calibrate ops=...` has added
            times of operators; None to use the rates alone.

    Raises:
        ConfigError: the mesh does not have a rank for each GPU, a number is invalid, or the file
            has no times of operators of a GPU.
    """

    nodes: int = 1
    gpus_per_node: int = GPUS_PER_NODE
    nodes_per_rack: int | None = None
    rack_oversubscription: float = 1.0
    mesh: tuple[int, ...] | None = field(default=None, metadata={INSTEAD: MESH_TODO})
    axes: tuple[str, ...] | None = None
    tf32: bool = False
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.85
    link_efficiency: float = 0.8
    memory_fraction: float = 0.9
    memory_bytes: int | None = None
    launch_s: float = RATES["cuda"]["launch_s"]
    boxing_launch_s: float = RATES["cuda"]["boxing_launch_s"]
    operators: str | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "nodes", "gpus_per_node", accepted="1 or more", why="")
        check_least(self, 2, "nodes_per_rack", accepted="2 or more", why="")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith(("efficiency", "fraction")) and not 0 < value <= 1:
                raise ConfigError(f"{entry.name}={value!r}", accepted="above 0, at most 1")
            if entry.name.endswith("launch_s") and not 0 <= value < inf:
                raise ConfigError(f"{entry.name}={value!r}", accepted="seconds >= 0")
        check_least(self, 1, "memory_bytes", accepted="1 or more, or null", why="")
        if not 1 <= self.rack_oversubscription < inf:
            raise ConfigError(
                f"rack_oversubscription={self.rack_oversubscription!r}",
                accepted="1 or more; 1: the uplink carries what the nodes of a rack can send",
            )
        if self.nodes_per_rack is None and self.rack_oversubscription != 1:
            raise ConfigError(
                f"rack_oversubscription={self.rack_oversubscription:g} without nodes_per_rack",
                accepted="both, or neither",
                todo="say how many nodes share an uplink, such as cluster.nodes_per_rack=4",
            )
        _operators(self.operators)
        nodes, gpus = self.nodes, self.gpus_per_node
        mesh = self.mesh or ((gpus,) if nodes == 1 else (nodes, gpus))
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "axes", named_axes(mesh, self.axes, None))
        if prod(mesh) != nodes * gpus:
            ranks = "1 rank" if prod(mesh) == 1 else f"{prod(mesh)} ranks"
            raise ConfigError(
                f"mesh={list(mesh)} has {ranks}, and nodes={nodes} of gpus_per_node={gpus} are "
                f"{nodes * gpus} GPUs",
                accepted="a rank for each GPU",
                todo=self._settings_for(prod(mesh)),
            )

    def _settings_for(self, ranks: int) -> str:
        """Return settings with as many GPUs as ranks."""
        whole, rest = divmod(ranks, self.gpus_per_node)
        if whole and not rest:
            return f"cluster.nodes={whole}, or another mesh"
        if ranks < self.gpus_per_node:
            return f"cluster.nodes=1 cluster.gpus_per_node={ranks}, or another mesh"
        return f"another mesh, or cluster.gpus_per_node, of which {ranks} is a multiple"


def _operators(file: str | None) -> tuple[MeasuredOperator, ...]:
    """Return the measured times of operators on a GPU from a cluster file.

    Raises:
        ConfigError: it has none.
    """
    if file is None:
        return ()
    cluster = Cluster.load(Path(file))
    if cluster.backend in cluster.calibrations:
        cluster = cluster.priced_by(cluster.backend)
    device = cluster.device
    if device.kind != "cuda" or not device.operators:
        what = f"was measured on a {device.kind}" if device.operators else "has none"
        raise ConfigError(
            f"operators={file!r} has no times of operators on a GPU: it {what}",
            accepted="a cluster file of such a GPU, with times of operators",
            todo="sbp-plan calls=calls.json, and on a machine with such a GPU sbp-calibrate "
            "boxing=torch boxing.device=cuda:0 ranks=1 out=FILE, and then the same with "
            "ops=calls.json",
        )
    return device.operators


def _make(name: str, config: GpuConfig, num_devices: int) -> Cluster:
    """Return the cluster that a profile describes."""
    node, gpus = NODES[name], config.gpus_per_node
    peaks = dict(node.flop_per_s)
    if config.tf32 and node.tf32_flop_per_s is not None:
        peaks["float32"] = node.tf32_flop_per_s

    def link(latency_s: float, peak_bytes_per_s: float) -> Link:
        return Link(latency_s=latency_s, bytes_per_s=config.link_efficiency * peak_bytes_per_s)

    network = link(NETWORK_LATENCY_S, node.network_bytes_per_s)
    groups: tuple[LinkLevel, ...] = ()
    between = network
    if config.nodes_per_rack is not None:
        ranks = gpus * config.nodes_per_rack
        groups = (LinkLevel(name="rack", num_ranks=ranks, link=network),)
        uplink = ranks * node.network_bytes_per_s / config.rack_oversubscription
        between = link(NETWORK_LATENCY_S, uplink)
    return Cluster(
        name=name,
        num_devices=num_devices,
        devices_per_node=gpus,
        device=Device(
            kind="cuda",
            memory_bytes=config.memory_bytes or int(config.memory_fraction * node.memory_bytes),
            flop_per_s={dtype: config.compute_efficiency * peak for dtype, peak in peaks.items()},
            memory_bytes_per_s=config.memory_efficiency * node.memory_bytes_per_s,
            launch_s=config.launch_s,
            boxing_launch_s=config.boxing_launch_s,
            host_memory_bytes=node.host_memory_bytes // GPUS_PER_NODE,
            host_link=link(PCIE_LATENCY_S, node.pcie_bytes_per_s),
            operators=_operators(config.operators),
        ),
        intra_node=link(NVLINK_LATENCY_S, node.nvlink_bytes_per_s),
        inter_node=between,
        inter_node_shared=bool(groups),
        groups=groups,
    )


def _maker(gpu: str, config: GpuConfig) -> ClusterFactory:
    """Return a function from a number of ranks to a cluster of nodes of a GPU."""
    return partial(_make, gpu, config)


build_v100 = partial(_maker, "v100")
build_a100 = partial(_maker, "a100")
build_h100 = partial(_maker, "h100")
build_h200 = partial(_maker, "h200")
build_b200 = partial(_maker, "b200")
