"""Chains of blocks and machines of nodes, for planners that cut a model into stages."""

from __future__ import annotations

import torch
from small_steps import captured, draws
from torch import nn
from torch.nn import functional

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.graph import LogicalGraph
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_torch.testing.programs import OneDeviceStep


class Block(nn.Module):
    """An MLP with a residual around it."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Blocks(nn.Module):
    """Blocks of some hidden widths, one after the other, then a head."""

    def __init__(self, width: int, hidden: tuple[int, ...], head: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, each) for each in hidden)
        self.head = nn.Linear(width, head, bias=False)

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def step_of(
    width: int, hidden: tuple[int, ...], head: int, *, samples: int, num_micro_batches: int
) -> OneDeviceStep:
    """Return the training step of `Blocks` in float64, and batches for two steps."""
    torch.manual_seed(0)
    return captured(
        Blocks(width, hidden, head),
        lambda count, seed: {"x": draws(seed, count * samples, width)},
        num_micro_batches,
    )


def machine(
    *, num_devices: int, devices_per_node: int, inside: float, between: float, flop_per_s: float
) -> Cluster:
    """Return nodes with links inside and between them, in bytes per second."""
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device=Device(
            memory_bytes=1 << 40, flop_per_s={"float64": flop_per_s}, memory_bytes_per_s=1e12
        ),
        intra_node=Link(latency_s=1e-7, bytes_per_s=inside),
        inter_node=Link(latency_s=1e-6, bytes_per_s=between),
    )


def nodes_of_two(*, inside: float, between: float, num_devices: int = 4) -> Cluster:
    """Return nodes of two ranks, on which small plans are neither all compute nor all latency."""
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=2,
        device=Device(memory_bytes=1 << 30, flop_per_s={"float32": 1e9}, memory_bytes_per_s=1e12),
        intra_node=Link(latency_s=1e-7, bytes_per_s=inside),
        inter_node=Link(latency_s=1e-7, bytes_per_s=between),
    )


def asked(graph: LogicalGraph, cluster: Cluster, **more: object) -> PlanRequest:
    """Return a request for all devices of a cluster on one mesh axis."""
    mesh = Placement.grid((cluster.num_devices,), ("data",))
    return PlanRequest(graph=graph, mesh=mesh, cluster=cluster, **more)
