"""Small models whose plans are run, and compared with one device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import compile_plan
from sbp_core.strategy import Strategy
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.programs import OneDeviceStep, assert_near, one_device_run


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
    model = Blocks(width, hidden, head).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def batch(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(count, width, generator=generator, dtype=torch.float64)}

    graph = capture(model, lambda model, batch: model.loss(batch), batch(samples, 0), optimizer)
    return OneDeviceStep(
        graph=prepare_step(graph, num_micro_batches),
        states=initial_states(model, optimizer),
        batches=tuple(batch(num_micro_batches * samples, 1 + index) for index in range(2)),
        scalars={"lr": 1e-2},
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


def assert_trains_as_one_device(step: OneDeviceStep, strategy: Strategy) -> None:
    """Run two steps of a plan; losses, and every shard of the states, are those of one device."""
    plan = compile_plan(step.graph, strategy)
    wanted, states = one_device_run(step)
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, step.states, LocalBackend()) as session:
        losses = run_steps(session, step)
        shards = shards_of(session, plan)
    for index, loss in enumerate(losses):
        assert_near(f"loss {index}", loss, wanted[index], 1e-9)
    check_shards(plan, shards, states, 1e-9)
