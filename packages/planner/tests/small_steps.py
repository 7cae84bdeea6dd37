"""Steps of small models in float64, and runs of their plans beside one device."""

import torch
from torch import nn
from torch.nn import functional

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import compile_plan
from sbp_core.graph import Phase
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.programs import OneDeviceStep, assert_near, one_device_run


def draws(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mlp(nn.Module):
    """Two wide layers."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def loss(self, batch):
        return (self.down(functional.gelu(self.up(batch["x"]))) - batch["x"]).square().mean()


class Classes(nn.Module):
    """A trunk and very many classes."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.trunk, self.head = nn.Linear(width, width), nn.Linear(width, classes, bias=False)

    def loss(self, batch):
        return functional.cross_entropy(self.head(self.trunk(batch["x"]).tanh()), batch["y"])


class Table(nn.Module):
    """A large table that is looked up a few times."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, width)

    def loss(self, batch):
        return self.head(self.table(batch["i"])).square().mean()


class Experts(nn.Module):
    """A router, and MLPs of which each sample is sent to two."""

    def __init__(self, width: int, hidden: int, num_experts: int):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(draws(0, num_experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(draws(1, num_experts, hidden, width) / hidden**0.5)

    def loss(self, batch):
        x = batch["x"]
        chances = self.router(x).softmax(dim=-1)
        picks = chances.topk(2, dim=-1).indices
        experts = torch.arange(chances.shape[1])
        weights = chances * (picks[:, :, None] == experts).to(x.dtype).sum(dim=1)
        hidden = functional.gelu(torch.bmm(x.expand(len(experts), *x.shape), self.up))
        y = torch.einsum("end,ne->nd", torch.bmm(hidden, self.down), weights)
        return (y - x).square().mean()


class LongSequence(nn.Module):
    """A block of a causal transformer with one head."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def loss(self, batch):
        x = batch["x"]
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.proj(y[:, 0])
        y = y + self.down(functional.gelu(self.up(y)))
        return (y - x.flip(-1)).square().mean()


class Chain(nn.Module):
    """Layers of equal size."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def captured(model, batch, num_micro_batches=1, options=None):
    """Return the training step of a model in float64, for batches of several micro-batches."""
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    graph = capture(model, lambda model, batch: model.loss(batch), batch(1, 0), optimizer)
    return OneDeviceStep(
        graph=prepare_step(graph, num_micro_batches, options=options or PassOptions()),
        states=initial_states(model, optimizer),
        batches=tuple(batch(num_micro_batches, 1 + index) for index in range(2)),
        scalars={"lr": 1e-2},
    )


def machine(bytes_per_s, num_ranks=2, flop_per_s=1e11):
    return Cluster(
        name="test",
        num_devices=num_ranks,
        devices_per_node=num_ranks,
        device=Device(
            memory_bytes=1 << 40, flop_per_s={"float64": flop_per_s}, memory_bytes_per_s=1e11
        ),
        intra_node=Link(latency_s=1e-7, bytes_per_s=bytes_per_s),
    )


def run_beside_one_device(step, strategy):
    """Run two steps of a strategy: losses and all shards of states are those of one device."""
    plan = compile_plan(step.graph, strategy)
    wanted, states = one_device_run(step)
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, step.states, LocalBackend()) as session:
        losses = run_steps(session, step)
        shards = shards_of(session, plan)
    for index, loss in enumerate(losses):
        assert_near(f"loss {index}", loss, wanted[index], 1e-9)
    check_shards(plan, shards, states, 1e-9)


def entries(strategy, name):
    return set(strategy.storage[name].sbp)


def signatures(step, strategy, op, phase=Phase.FORWARD):
    """Return the signatures of the operators of a kind in a phase, each input and output once."""
    return [
        tuple(tuple(of[0] for of in side) for side in (found.inputs, found.outputs))
        for node in step.graph.nodes
        if node.kind == op and node.phase is phase
        for found in [strategy.nodes[node.name].signature]
    ]
