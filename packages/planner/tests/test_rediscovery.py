"""Given a model and a machine alone, `auto` finds what people do by hand; it runs as one device."""

import torch
from torch import nn
from torch.nn import functional

from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import compile_plan
from sbp_core.graph import Phase
from sbp_core.placement import Placement
from sbp_core.plugins import PlanRequest
from sbp_core.sbp import B, P, S
from sbp_planner.auto import build
from sbp_planner.search_configs import AutoConfig
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.programs import OneDeviceStep, assert_near, one_device_run


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


def captured(model, batch, num_micro_batches=1):
    """Return the training step of a model in float64, for batches of several micro-batches."""
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    graph = capture(model, lambda model, batch: model.loss(batch), batch(1, 0), optimizer)
    return OneDeviceStep(
        graph=prepare_step(graph, num_micro_batches),
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


def planned(step, cluster, **settings):
    """Plan a step with `auto`, and compare a run of it with one device."""
    mesh = Placement.grid((cluster.num_devices,), ("data",))
    asked = PlanRequest(graph=step.graph, mesh=mesh, cluster=cluster)
    strategy = build(AutoConfig(time_limit_s=120, **settings)).plan(asked)
    plan = compile_plan(step.graph, strategy)
    wanted, states = one_device_run(step)
    runtime = ReferenceRuntime(ReferenceConfig())
    with runtime.start(plan, step.states, LocalBackend()) as session:
        losses = run_steps(session, step)
        shards = shards_of(session, plan)
    for index, loss in enumerate(losses):
        assert_near(f"loss {index}", loss, wanted[index], 1e-9)
    check_shards(plan, shards, states, 1e-9)
    return strategy


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


def draws(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_columns_and_rows_of_an_mlp_where_parameters_are_more_than_samples():
    step = captured(Mlp(64, 256), lambda n, seed: {"x": draws(seed, 4 * n, 64)})

    strategy = planned(step, machine(1e9))

    # Megatron's: the first by its output, the second by its input, one sum behind it.
    assert entries(strategy, "up.weight") == {S(0)}
    assert entries(strategy, "down.weight") == {S(1)}
    products = [s.signature for n, s in strategy.nodes.items() if n.startswith("down.addmm")]
    assert any(P("sum") in sbp for signature in products for sbp in signature.outputs)


def test_classes_are_split_where_there_are_very_many():
    def batch(n, seed):
        labels = torch.randint(4096, (4 * n,), generator=torch.Generator().manual_seed(seed))
        return {"x": draws(seed, 4 * n, 16), "y": labels}

    strategy = planned(captured(Classes(16, 4096), batch), machine(1e9))

    assert entries(strategy, "head.weight") == {S(0)}
    made = [sbp for one in strategy.nodes.values() for sbp in one.signature.outputs]
    assert any(P("max") in sbp for sbp in made), "no rank has maxima of its classes"


def test_a_large_table_is_split():
    def batch(n, seed):
        generator = torch.Generator().manual_seed(seed)
        return {"i": torch.randint(8192, (8 * n,), generator=generator)}

    strategy = planned(captured(Table(8192, 16), batch), machine(1e9))

    assert entries(strategy, "table.weight") <= {S(0), S(1)}


def test_experts_are_split_where_they_are_more_than_samples():
    step = captured(Experts(16, 64, 4), lambda n, seed: {"x": draws(seed, 4 * n, 16)})

    strategy = planned(step, machine(1e9))

    # Each rank stores, computes and updates experts of its own; their results are summed.
    assert entries(strategy, "up") == entries(strategy, "down") == {S(0)}
    assert entries(strategy, "router.weight") == {B}
    up, down, combined = signatures(step, strategy, "bmm")
    assert up == down == ((S(0), S(0)), (S(0),))
    assert combined[1] == (P("sum"),)


def test_the_tokens_of_a_long_sequence_are_split():
    step = captured(LongSequence(32), lambda n, seed: {"x": draws(seed, n, 512, 32)})

    strategy = planned(step, machine(1e10))

    # Context parallelism: queries of a rank see the keys of all; all else is done token by token.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    (forward,) = signatures(step, strategy, attention)
    assert forward == ((S(2), B, B), (S(2), S(2)))
    (backward,) = signatures(step, strategy, f"{attention}_backward", Phase.BACKWARD)
    assert backward[1] == (S(2), P("sum"), P("sum"))
    assert set(signatures(step, strategy, "addmm")) == {((B, S(0), B), (S(0),))}


def test_states_are_sharded_where_memory_is_short_and_links_are_fast():
    def batch(n, seed):
        return {"x": draws(seed, 64 * n, 64)}

    step = captured(Chain(64, 4), batch)
    # All states of AdamW in float64, whole, beside gradients: more than this.
    whole = 4 * sum(state.numel() * 8 for name, state in step.states.items() if "exp" not in name
                    and isinstance(state, torch.Tensor))  # fmt: skip

    strategy = planned(step, machine(1e12), memory_bytes=0.95 * whole)

    for at in range(4):
        assert entries(strategy, f"layers.{at}.weight.exp_avg") <= {S(0), S(1)}


def test_a_pipeline_goes_across_slow_links():
    def batch(n, seed):
        return {"x": draws(seed, 4 * n, 128)}

    slow = machine(1e7, flop_per_s=1e9)
    strategy = planned(captured(Chain(128, 4), batch, num_micro_batches=8), slow)

    assert len(strategy.stages) == 2
    assert [strategy.storage[f"layers.{at}.weight"].stage for at in range(4)] == [0, 0, 1, 1]
