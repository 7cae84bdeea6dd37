"""What happens beside the optimizer: clipping, averages, loss scaling, scheduled settings."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn, optim
from updates import (
    ALL,
    STRATEGIES,
    TRACED,
    Counting,
    compare,
    compare_sharded,
    eager,
    graph_run,
    made,
    net_batch,
    net_loss,
    of,
    rates,
)

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.errors import CaptureError, SbpValueError
from sbp_core.infer import infer_strategy
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import (
    LossScaling,
    UpdateOptions,
    capture,
    initial_states,
    scalar_values,
)
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import assert_equal, assert_near, small_cluster

EVERYTHING = UpdateOptions(
    clip_norm=0.05, ema_decay=0.9, loss_scaling=LossScaling(), scheduled=("weight_decay",)
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_averages_and_scaling_can_be_sharded(strategy: str) -> None:
    compare_sharded(TRACED["fused adamw"], strategy, 2, EVERYTHING)


@pytest.mark.slow
def test_the_norm_is_that_of_all_stages_and_micro_batches() -> None:
    options = UpdateOptions(clip_norm=0.05, ema_decay=0.9, loss_scaling=LossScaling())
    model, optimizer = made(TRACED["fused adamw"])
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer, update=options), 2)
    states: Mapping[str, Tensor | float] = initial_states(model, optimizer, options)
    scalars = scalar_values(model, optimizer, options)
    mesh = Placement.grid((4,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(4))
    stages = (Placement([0, 1], ("data",)), Placement([2, 3], ("data",)))
    strategy = infer_strategy(
        request,
        planner="test",
        pins={"batch": "S(0)"},
        stages=stages,
        stage_patterns=(("first",), ("last",)),
    )
    untied = capture(model, net_loss, net_batch(0), optimizer, update=options)

    plan = compile_plan(graph, strategy)
    check(plan)
    first = initial_states(model, optimizer, options)
    with ReferenceRuntime(ReferenceConfig()).start(plan, first, LocalBackend()) as session:
        for index in range(0, 6, 2):
            pair = [net_batch(index), net_batch(index + 1)]
            with torch.no_grad():
                wanted, states = run_graph(accumulate(untied, 2), states, pair, scalars)
            whole = {key: torch.cat([batch[key] for batch in pair]) for key in pair[0]}
            found = session.step(whole, scalars).outputs
            assert set(found) == {"loss", "grad_norm", "skipped", "loss_scale"}
            for key, value in wanted.items():
                assert_near(key, found[key], value, 1e-11)
        made_states = session.state_dict()

    for name, value in states.items():
        assert_near(name, made_states[name], value, 1e-11)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
def test_clipping_by_norm_is_that_of_torch(order: float) -> None:
    norms: list[Tensor] = []

    def between(model: nn.Module) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order))

    model, _ = eager(TRACED["momentum"], 5, between)

    states, found = graph_run(TRACED["momentum"], 5, UpdateOptions(clip_norm=0.05, norm_type=order))

    compare(states, model, 1e-12)
    for results, norm in zip(found, norms, strict=True):
        assert norm > 0.05, "nothing is clipped"
        assert_near("grad_norm", results["grad_norm"], norm, 1e-12)


def test_clipping_by_value_is_that_of_torch() -> None:
    model, _ = eager(
        TRACED["momentum"], 5, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)
    )

    states, _ = graph_run(TRACED["momentum"], 5, UpdateOptions(clip_value=0.01))

    compare(states, model, 0.0)


def test_the_norm_can_be_reported_without_clipping() -> None:
    model, _ = eager(TRACED["sgd"], 2)

    states, found = graph_run(TRACED["sgd"], 2, UpdateOptions(report_norm=True))

    compare(states, model, 0.0)
    assert set(found[0]) == {"loss", "grad_norm"}


@pytest.mark.slow
def test_averages_are_those_of_an_averaged_model() -> None:
    model, optimizer = made(TRACED["adamw"])
    ema = optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
    for index in range(4):
        for group, rate in zip(
            optimizer.param_groups, rates(made(TRACED["adamw"])[1], index).values(), strict=True
        ):
            group["lr"] = rate
        optimizer.zero_grad()
        net_loss(model, net_batch(index)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averaged.update_parameters(model)

    states, _ = graph_run(TRACED["adamw"], 4, UpdateOptions(ema_decay=0.9))

    compare(states, model, 0.0)
    for name, value in averaged.module.named_parameters():
        assert_near(f"{name}.ema", states[f"{name}.ema"], value.detach(), 1e-15)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["momentum", "adamw", "fused adamw", "nadam", "adagrad", "lamb"])
def test_a_step_that_overflows_changes_nothing_but_the_scale(name: str) -> None:
    options = UpdateOptions(
        loss_scaling=LossScaling(init_scale=1024.0, growth_interval=2), ema_decay=0.9
    )
    model, optimizer = made(ALL[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    graph = capture(model, net_loss, net_batch(0), optimizer, update=options)
    states: Mapping[str, Tensor | float] = initial_states(model, optimizer, options)
    scalars = scalar_values(model, optimizer, options)

    for index in range(7):
        batch = net_batch(index)
        if index in (0, 4):
            batch["y"] = batch["y"] * math.inf
        before = states
        optimizer.zero_grad()
        scaler.scale(net_loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            results, states = run_graph(graph, states, [batch], scalars)

        assert_equal("loss_scale", results["loss_scale"], torch.tensor(scaler.get_scale()))
        assert bool(results["skipped"]) is (index in (0, 4))
        if results["skipped"]:
            kept = [key for key in states if not key.startswith("loss_scaler.")]
            assert len(kept) == len(states) - 2
            for key in kept:
                assert_equal(key, states[key], before[key])
    compare(states, model, 1e-12)


@pytest.mark.slow
def test_the_count_of_averages_is_a_clock_of_its_own() -> None:
    model, optimizer = made(TRACED["adamw"])

    graph = prepare_step(
        capture(model, net_loss, net_batch(0), optimizer, update=UpdateOptions(ema_decay=0.9))
    )

    tied = {entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for}
    assert list(tied) == ["step_counter", "step_counter.count"]
    assert tied["step_counter.count"] == ("ema.count",)
    assert "gain.step" in tied["step_counter"]


@pytest.mark.slow
def test_settings_of_groups_can_be_scheduled() -> None:
    options = UpdateOptions(scheduled=("weight_decay", "beta2"))
    model, optimizer = made(of(optim.AdamW, lr=0.01, weight_decay=0.0))
    graph = capture(model, net_loss, net_batch(0), optimizer, update=options)
    states: Mapping[str, Tensor | float] = initial_states(model, optimizer, options)

    for index in range(3):
        scalars = {"lr": 0.01, "weight_decay": 0.1 * index, "beta2": 0.9 + 0.01 * index}
        group = optimizer.param_groups[0]
        group |= {"weight_decay": 0.1 * index, "betas": (0.9, 0.9 + 0.01 * index)}
        optimizer.zero_grad()
        net_loss(model, net_batch(index)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            _, states = run_graph(graph, states, [net_batch(index)], scalars)

    compare(states, model, 0.0)


def test_scaling_refuses_an_optimizer_that_counts_on_the_host() -> None:
    model, optimizer = made(of(Counting))

    with pytest.raises(CaptureError, match="Counting reads the number of the step"):
        capture(
            model,
            net_loss,
            net_batch(0),
            optimizer,
            update=UpdateOptions(loss_scaling=LossScaling()),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"norm_type": -1.0},
        {"clip_value": -0.1},
        {"ema_decay": 1.0},
        {"ema_decay": -0.1},
        {"scheduled": ("eps",)},
    ],
)
def test_options_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SbpValueError, match=next(iter(settings)).split("_")[0] + "|eps"):
        UpdateOptions(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
    ],
)
def test_scaling_out_of_range_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SbpValueError, match=next(iter(settings))):
        LossScaling(**settings)  # type: ignore[arg-type]
