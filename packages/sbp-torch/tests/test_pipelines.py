"""Pipelines of any schedule compute what one device does: ties, skips, dropout and statistics."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph.ir import Phase
from sbp_core.infer import infer_strategy, pipelined
from sbp_core.pipeline import SCHEDULES
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.reference import ReferenceConfig, ReferenceSession
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import (
    OneDeviceStep,
    RunningNorm,
    graph_states,
    small_cluster,
    split_batch,
)

NUM_MICRO_BATCHES = 8


class TiedModel(nn.Module):
    """Ids (n,) to logits of 11 ids by the embedding itself, with a skip over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norm = RunningNorm(6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = first = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(block(F.gelu(hidden)))
        return F.linear(self.norm(hidden + first), self.embed.weight)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, and a term of what the first block makes."""
    logits = model(batch["ids"])
    return F.cross_entropy(logits, batch["classes"]) + 1e-2 * logits.square().mean()


@cache
def tied_step() -> OneDeviceStep:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = TiedModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def batch(size: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randint(0, 11, (size,), generator=generator) for name in ("ids", "classes")
        }

    graph = capture(model, loss, batch(5, 0), optimizer, name="tied")
    return OneDeviceStep(
        graph=prepare_step(graph, NUM_MICRO_BATCHES),
        states=initial_states(model, optimizer),
        batches=tuple(batch(5 * NUM_MICRO_BATCHES, 1 + seed) for seed in range(2)),
        scalars={},
    )


def run(steps, states):
    """Return the losses of taking each batch, and the last states."""
    found = []
    for number, batch in enumerate(tied_step().batches):
        loss_, states = steps(batch, {"lr": 1e-2, "seed": 0, "step": number}, states)
        found.append(loss_)
    return found, states


@cache
def on_one_device():
    step = tied_step()

    def take(batch, scalars, states):
        micro = split_batch(batch, NUM_MICRO_BATCHES)
        outputs, states = run_graph(step.graph, states, micro, scalars)
        return outputs["loss"], states

    with torch.no_grad():
        return run(take, graph_states(step.graph, step.states))


def on_ranks(plan):
    session = ReferenceSession(plan, tied_step().states, ReferenceConfig())
    losses, _ = run(
        lambda batch, scalars, _: (session.step(batch, scalars).outputs["loss"], {}), {}
    )
    return losses, session.state_dict()


def plan_of(name, mesh, *, overlap=False, pins=None):
    step = tied_step()
    stages = pipelined(mesh, name, NUM_MICRO_BATCHES)
    request = PlanRequest(graph=step.graph, mesh=mesh, cluster=small_cluster(mesh.size))
    strategy = infer_strategy(
        request, planner="test", pins=pins or {}, stages=stages.stages, in_flight=stages.in_flight,
        orders=stages.orders,
    )  # fmt: skip
    plan = compile_plan(step.graph, strategy, CompileOptions(overlap=overlap))
    check(plan)
    return plan


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("pipedream", "2bw", "auto")])
def test_a_pipeline_computes_what_one_device_does(name):
    plan = plan_of(name, Placement.grid((4,), ("pipe",)))

    losses, states = on_ranks(plan)

    wanted, whole = on_one_device()
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
    names = [name for name in whole if name in states]
    assert {"embed.weight", "norm.running_mean"} <= set(names)
    for name in names:
        torch.testing.assert_close(states[name], whole[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zbv", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("pins", [{}, {"batch": "S(0)", "parameters": "S(0)"}])
def test_stages_may_be_data_parallel_or_sharded_and_overlap_their_boxing(name, pins):
    mesh = Placement.grid((2, 2), ("pipe", "data"))
    plan = plan_of(name, mesh, overlap=True, pins=pins)

    losses, _ = on_ranks(plan)

    torch.testing.assert_close(losses, on_one_device()[0], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_both_stages_have_weight_gradients_of_their_own():
    plan = plan_of("zero_bubble", Placement.grid((2,), ("pipe",)))

    late = [a for part in plan.ranks for a in part.actors if a.phase is Phase.WEIGHT_GRADIENT]

    assert {actor.stage for actor in late} == {0, 1}
