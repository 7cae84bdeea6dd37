"""Pipelines of convolutions: input gradients leave before weight gradients are computed."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sbp_aten import PassOptions, prepare_step
from sbp_core.compile import Compute, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.graph.ir import Phase
from sbp_core.infer import infer_strategy, pipelined
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.reference import ReferenceConfig, ReferenceSession
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import graph_states, small_cluster, split_batch

NUM_MICRO_BATCHES = 4
BACKWARD = "aten.convolution_backward.default"


def make_batch(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"images": torch.randn(size, 3, 6, 6, generator=generator, dtype=torch.float64)}


def make_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["images"]).square().mean()


def convolution(kind: str, channels: int) -> nn.Module:
    if kind == "transposed":
        return nn.ConvTranspose2d(channels, 4, 3, padding=1)
    return nn.Conv2d(channels, 4, 3, padding=1, bias=kind != "without bias")


@cache
def captured(kind: str) -> tuple[LogicalGraph, dict[str, Tensor]]:
    """Return the step of four convolutions of a kind, and its states."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        channels = (3, 4, 4, 4)
        layers = [nn.Sequential(convolution(kind, count), nn.Tanh()) for count in channels]
        model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    graph = capture(model, make_loss, make_batch(2, 0), optimizer, name="convolutions")
    return graph, dict(initial_states(model, optimizer))


def prepared(kind: str, *, split: bool | None) -> LogicalGraph:
    return prepare_step(
        captured(kind)[0], NUM_MICRO_BATCHES, options=PassOptions(split_backward=split)
    )


def plan_of(graph: LogicalGraph, schedule: str):
    mesh = Placement.grid((2,), ("pipe",))
    stages = pipelined(mesh, schedule, NUM_MICRO_BATCHES)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(2))
    strategy = infer_strategy(
        request, planner="test", pins={}, stages=stages.stages, in_flight=stages.in_flight,
        orders=stages.orders,
    )  # fmt: skip
    plan = compile_plan(graph, strategy)
    check(plan)
    return plan


def masks_of(plan, phase: Phase) -> list[tuple[bool, ...]]:
    """Return what each convolution of a phase computes, on all ranks: of input, weights, bias."""
    actors = [actor for rank in plan.ranks for actor in rank.actors if isinstance(actor, Compute)]
    return [
        instruction.args[10]
        for actor in actors
        if actor.phase is phase
        for instruction in actor.instructions
        if instruction.op == BACKWARD
    ]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["with bias", "without bias", "transposed"])
def test_parts_of_a_convolution_compute_the_very_bits_of_the_whole(kind):
    states, scalars = captured(kind)[1], {"lr": 1e-2, "seed": 0, "step": 0}
    batch = split_batch(make_batch(2 * NUM_MICRO_BATCHES, 1), NUM_MICRO_BATCHES)
    whole, parts = prepared(kind, split=False), prepared(kind, split=True)

    found, wanted = (
        run_graph(graph, graph_states(graph, states), batch, scalars) for graph in (parts, whole)
    )

    assert len(parts.nodes) == len(whole.nodes) + 3  # the first convolution has no input gradient
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_a_pipeline_computes_weight_gradients_of_convolutions_apart(schedule):
    graph, states = prepared("with bias", split=True), captured("with bias")[1]
    scalars = {"lr": 1e-2, "seed": 0, "step": 0}
    batch = make_batch(2 * NUM_MICRO_BATCHES, 1)
    plan = plan_of(graph, schedule)

    session = ReferenceSession(plan, states, ReferenceConfig())
    loss = session.step(batch, scalars).outputs["loss"]

    outputs, wanted = run_graph(
        graph, graph_states(graph, states), split_batch(batch, NUM_MICRO_BATCHES), scalars
    )
    torch.testing.assert_close(loss, outputs["loss"], rtol=1e-9, atol=1e-9)
    found = session.state_dict()
    for name in wanted.keys() & found.keys():
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9)
    assert wanted.keys() & found.keys() >= {"0.0.weight", "3.0.bias"}
    apart = masks_of(plan, Phase.WEIGHT_GRADIENT)
    assert apart
    assert not any(of_input for of_input, *_ in apart)


def test_convolutions_that_are_whole_keep_their_weight_gradients_in_the_backward_phase():
    plan = plan_of(prepared("with bias", split=None), "zero_bubble")

    late, backward = (masks_of(plan, p) for p in (Phase.WEIGHT_GRADIENT, Phase.BACKWARD))

    assert (True, True, True) in backward
    assert set(late) <= {(False, True, True)}
