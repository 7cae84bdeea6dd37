"""Asynchronous pipelines compute delayed updates: PipeDream and 2BW beside a plain simulation."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.compile import PhysicalPlan, compile_plan
from sbp_core.errors import ConfigError
from sbp_core.graph.ir import Phase
from sbp_core.infer import infer_strategy, pipelined
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.reference import ReferenceConfig, ReferenceSession
from sbp_torch.testing.programs import RunningNorm, small_cluster, split_batch

#: Of a step, and of each of its updates.
NUM_MICRO_BATCHES, EACH = 12, 3
SIZE = 3


class TiedModel(nn.Module):
    """Ids (n,) to logits of 11 ids by the embedding itself, with a skip over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norm = RunningNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = first = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(F.gelu(hidden))
        return F.linear(self.norm(hidden + first), self.embed.weight)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["classes"])


def make() -> tuple[TiedModel, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = TiedModel().double()
    # With a larger eps, rounding in gradients that are nearly zero is not a step of its own.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)


def batch(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(0, 11, (size,), generator=generator) for n in ("ids", "classes")}


BATCHES = [batch(SIZE * NUM_MICRO_BATCHES, 1 + seed) for seed in range(2)]


@cache
def graph(each: int = 1):
    model, optimizer = make()
    captured = capture(model, loss, batch(SIZE, 0), optimizer, name="tied")
    asynchronous = LossMeaning.EACH_MICRO_BATCH
    return prepare_step(
        captured, NUM_MICRO_BATCHES, loss=asynchronous, micro_batches_per_update=each
    )


def plan_of(
    mesh: Placement,
    *,
    name: str = "pipedream",
    each: int = 1,
    vertical_sync: bool = False,
    pins: Mapping[str, str] | None = None,
) -> tuple[PhysicalPlan, dict[str, int]]:
    """Return the plan, and the stage of each parameter."""
    request = PlanRequest(graph=graph(each), mesh=mesh, cluster=small_cluster(mesh.size))
    stages = pipelined(
        mesh,
        name,
        NUM_MICRO_BATCHES,
        num_updates=NUM_MICRO_BATCHES // each,
        vertical_sync=vertical_sync,
    )
    strategy = infer_strategy(
        request,
        planner="test",
        pins=pins or {},
        stages=stages.stages,
        in_flight=stages.in_flight,
        staleness=stages.staleness,
    )
    plan = compile_plan(graph(each), strategy)
    check(plan)
    return plan, {name: storage.stage for name, storage in strategy.storage.items()}


def delayed_updates(
    staleness: Mapping[str, int], each: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train as the papers say, with PyTorch alone: w(t+1) = w(t) - lr * grad f(w(t - staleness)).

    Args:
        staleness: Of parameters, in updates.
        each: How many micro-batches an update is by.

    Returns:
        The loss of each step, the mean over its micro-batches, and the last states.
    """
    model, optimizer = make()
    parameters = dict(model.named_parameters())
    losses = []
    for whole in BATCHES:
        versions = [{name: p.detach().clone() for name, p in parameters.items()}]
        found = []
        for index, part in enumerate(split_batch(whole, NUM_MICRO_BATCHES)):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(versions[max(0, index // each - staleness[name])][name])
            if index % each == 0:
                optimizer.zero_grad()
            result = loss(model, part)
            (result / each).backward()
            found.append(result.detach())
            if (index + 1) % each:
                continue
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(versions[-1][name])
            optimizer.step()
            versions.append({name: p.detach().clone() for name, p in parameters.items()})
        losses.append(torch.stack(found).mean())
    return losses, dict(model.state_dict())


def on_ranks(plan: PhysicalPlan) -> tuple[list[Tensor], dict[str, Tensor]]:
    states = initial_states(*make())
    session = ReferenceSession(plan, states, ReferenceConfig())
    losses = [
        session.step(one, {"lr": 1e-2, "seed": 0, "step": number}).outputs["loss"]
        for number, one in enumerate(BATCHES)
    ]
    return losses, session.state_dict()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize(
    ("shape", "pins"),
    [
        ((2, 1), {}),
        ((4, 1), {}),
        ((2, 2), {"batch": "S(0)", "parameters": "B"}),
        ((2, 2), {"batch": "S(0)", "parameters": "S(0)"}),
    ],
)
def test_an_asynchronous_pipeline_is_the_simulation_of_delayed_updates(shape, pins, vertical_sync):
    mesh = Placement.grid(shape, ("pipe", "data"))
    plan, stage_of = plan_of(mesh, vertical_sync=vertical_sync, pins=pins)

    losses, states = on_ranks(plan)

    last = shape[0] - 1
    staleness = {name: last - (0 if vertical_sync else stage) for name, stage in stage_of.items()}
    assert max(staleness[name] for name, _ in make()[0].named_parameters()) == last
    wanted, whole = delayed_updates(staleness)
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
    for name, value in whole.items():
        torch.testing.assert_close(states[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", ["2bw", "pipedream"])
@pytest.mark.parametrize(
    ("shape", "each", "pins"),
    [
        ((2, 1), 2, {}),
        ((4, 1), 3, {}),
        ((4, 1), 6, {}),
        ((2, 2), 4, {"batch": "S(0)", "parameters": "B"}),
        ((2, 2), 3, {"batch": "S(0)", "parameters": "S(0)"}),
    ],
)
def test_updates_by_several_micro_batches_are_those_of_the_simulation(shape, each, pins, name):
    mesh = Placement.grid(shape, ("pipe", "data"))
    plan, stage_of = plan_of(mesh, name=name, each=each, pins=pins)

    losses, states = on_ranks(plan)

    # 2BW is one update behind everywhere; PipeDream, with as many micro-batches an update, is so
    # but on the last stage.
    last = shape[0] - 1
    staleness = {n: int(name == "2bw" or stage < last) for n, stage in stage_of.items()}
    wanted, whole = delayed_updates(staleness, each)
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
    for state, value in whole.items():
        torch.testing.assert_close(states[state], value, rtol=1e-9, atol=1e-9)


def test_several_updates_a_step_equal_as_many_steps_where_nothing_is_stale():
    plan, stage_of = plan_of(Placement.grid((2,), ("data",)), name="1f1b", each=EACH)

    losses, states = on_ranks(plan)

    wanted, whole = delayed_updates(dict.fromkeys(stage_of, 0), EACH)
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
    for state, value in whole.items():
        torch.testing.assert_close(states[state], value, rtol=1e-9, atol=1e-9)


def test_2bw_holds_two_versions_on_every_stage():
    plan, _ = plan_of(Placement.grid((4,), ("pipe",)), name="2bw", each=EACH)

    versions = [{r.quota for r in part.registers if r.staleness} for part in plan.ranks]

    assert versions == [{2}] * 4
    assert set(plan.staleness.values()) == {1}


def test_2bw_goes_on_before_the_update_of_what_is_in_work():
    plan, _ = plan_of(Placement.grid((4,), ("pipe",)), name="2bw", each=EACH)
    first = plan.by_rank[0]

    firings = [(first.by_name[name].phase, index) for name, index in first.orders["compute"]]

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    for update in range(1, NUM_MICRO_BATCHES // EACH):
        last = max(at for at, one in enumerate(firings) if one == (backward, update * EACH - 1))
        assert firings.index((forward, update * EACH)) < last


def test_too_few_micro_batches_an_update_for_2bw_are_refused():
    mesh = Placement.grid((4,), ("pipe",))

    with pytest.raises(
        ConfigError, match="two versions of the parameters, too few for 4 stages"
    ) as refused:
        pipelined(mesh, "2bw", 12, num_updates=6)

    assert "trainer.micro_batches_per_update=4" in refused.value.todo


def test_the_delay_is_not_lost_in_the_tolerance():
    fresh, _ = delayed_updates(dict.fromkeys(dict(make()[0].named_parameters()), 0))
    stale, _ = delayed_updates(dict.fromkeys(dict(make()[0].named_parameters()), 1))

    assert all(abs(one - other) > 1e-6 for one, other in zip(fresh, stale, strict=True))


def test_a_stage_holds_as_many_versions_as_it_has_micro_batches_in_work():
    plan, _ = plan_of(Placement.grid((4,), ("pipe",)))

    quotas = [
        max((r.quota for r in part.registers if r.staleness), default=0) for part in plan.ranks
    ]

    assert plan.staleness["embed.weight"] == 3
    assert quotas == [4, 3, 2, 0]


def test_a_pipeline_of_a_rate_that_the_step_does_not_have_is_refused():
    mesh = Placement.grid((2,), ("pipe",))

    with pytest.raises(ConfigError, match="this step has one update") as synchronous:
        pipelined(mesh, "pipedream", 4)
    with pytest.raises(ConfigError, match="would wait before the next micro-batch") as each:
        pipelined(mesh, "1f1b", 4, num_updates=4)

    assert "trainer.loss=each_micro_batch" in synchronous.value.todo
    assert "planner.pipeline=pipedream" in each.value.todo
