"""`parallelize` with ranks as threads equals plain PyTorch."""

from __future__ import annotations

import gc
import io
import weakref
from dataclasses import replace

import pytest
import torch
from plain_training import (
    LAYOUTS,
    SIZE,
    assert_trained_alike,
    batch_of,
    eager_step,
    loss_of,
    make_model,
    make_optimizer,
)

from sbp_core.errors import ConfigError, RunError
from sbp_core.strategy import Strategy
from sbp_launch import MicroBatches, parallelize
from sbp_torch.deferred_init import deferred
from sbp_torch.graph_capture import UpdateOptions


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_loop_with_clipping_and_a_schedule_equals_plain_pytorch(layout):
    model, eager = make_model(), make_model()
    optimizer, eager_optimizer = make_optimizer(model), make_optimizer(eager)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=6)
        for one in (optimizer, eager_optimizer)
    ]

    with parallelize(
        model, loss_of, batch_of(0), optimizer, update={"clip_norm": 0.5}, **layout
    ) as step:
        for index in range(4):
            found = float(step(batch_of(index)))
            wanted = eager_step(
                eager,
                eager_optimizer,
                batch_of(index),
                micro_batches=MicroBatches.of(layout.get("micro_batches", 1)).known_count,
                clip_norm=0.5,
            )
            for schedule in schedules:
                schedule.step()
            assert abs(found - wanted) <= 1e-9

        assert_trained_alike(step, eager, eager_optimizer)


def test_random_numbers_are_those_of_one_device():
    model, eager = make_model(dropout=0.5), make_model(dropout=0.5)
    eager_optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        for index in range(3):
            wanted = eager_step(eager, eager_optimizer, batch_of(index), draw=index)
            assert abs(step(batch_of(index)).item() - wanted) <= 1e-9


def test_an_output_is_its_loss_and_has_metrics():
    model = make_model()

    with parallelize(
        model, loss_of, batch_of(0), make_optimizer(model), update={"clip_norm": 1.0}
    ) as step:
        found = step(batch_of(0))

    loss, metrics = loss_of(make_model(), batch_of(0))
    assert float(found) == found.item() == found.loss.item() == pytest.approx(loss.item())
    assert found.metrics.keys() == {"worst", "grad_norm"}
    assert found.metrics["worst"].item() == pytest.approx(metrics["worst"].item())
    assert f"{found:.3f}" == f"{loss.item():.3f}"
    assert repr(found).startswith("StepOutput(loss=")


def test_the_learning_rate_can_be_an_argument():
    model, eager = make_model(), make_model()
    optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        for index, rate in enumerate((0.0, 0.1)):
            optimizer.param_groups[0]["lr"] = rate
            eager_step(eager, optimizer, batch_of(index))
            step(batch_of(index), lr=rate)

        assert_trained_alike(step, eager, optimizer)


def test_one_rate_holds_for_all_groups_and_a_numbered_one_for_its_own():
    def grouped(model):
        groups = [{"params": list(layer.parameters())} for layer in (model[0], model[3], model[4])]
        return torch.optim.SGD(groups, lr=0.5)

    model, eager = make_model(), make_model()
    optimizer = grouped(eager)
    for group, rate in zip(optimizer.param_groups, (0.1, 0.1, 0.2), strict=True):
        group["lr"] = rate
    eager_step(eager, optimizer, batch_of(0))

    with parallelize(model, loss_of, batch_of(0), grouped(model)) as step:
        step(batch_of(0), **{"lr": 0.1, "lr.2": 0.2})
        found = step.model_state_dict()

    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def test_schedulers_do_not_warn():
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)

    with parallelize(model, loss_of, batch_of(0), optimizer) as step:
        step(batch_of(0))
        schedule.step()  # would warn, and warnings are errors here


def test_a_scheduled_setting_follows_the_optimizer():
    model, eager = make_model(), make_model()
    optimizers = make_optimizer(model), make_optimizer(eager)
    update = UpdateOptions(scheduled=("weight_decay",))

    with parallelize(model, loss_of, batch_of(0), optimizers[0], update=update) as step:
        for index in range(2):
            for one in optimizers:
                one.param_groups[0]["weight_decay"] = 0.3 * index
            eager_step(eager, optimizers[1], batch_of(index))
            step(batch_of(index))

        assert_trained_alike(step, eager, optimizers[1])


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
def test_evaluation_takes_batches_of_any_size_and_changes_nothing(layout):
    model, eager = make_model(dropout=0.5), make_model(dropout=0.5)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), **layout) as step:
        step(batch_of(0))
        before = step.state_dict()
        found = [float(step.evaluate(batch_of(7, size))) for size in (SIZE, 3, SIZE)]
        after = step.state_dict()
        step(batch_of(1))
        later = float(step.evaluate(batch_of(7)))
        step.copy_to(eager)

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert found[0] == found[2] != later
    assert later == pytest.approx(loss_of(eager.eval(), batch_of(7))[0].item())
    assert model.training


def test_without_an_update_the_model_trains_and_nothing_changes():
    model = make_model()

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        before = step.state_dict()
        with step.no_update():
            found = float(step(batch_of(3, size=5)))
        after = step.state_dict()

    assert found == pytest.approx(loss_of(make_model(), batch_of(3, size=5))[0].item())
    assert all(torch.equal(before[name], after[name]) for name in before)  # of batch norm, too


@pytest.mark.parametrize("kind", ["deferred", "meta"])
def test_a_model_without_memory_begins_with_its_own_values(kind):
    states = None
    if kind == "deferred":
        model = deferred(make_model, seed=0)
        optimizer = make_optimizer(model.model)
    else:
        with torch.device("meta"):
            model = make_model()
        optimizer, states = make_optimizer(model), make_model().state_dict()
    eager = make_model()
    eager_optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), optimizer, mesh=2, states=states) as step:
        eager_step(eager, eager_optimizer, batch_of(0))
        step(batch_of(0))

        assert_trained_alike(step, eager, eager_optimizer)


def test_an_optimizer_that_has_stepped_goes_on():
    model, eager = make_model(), make_model()
    optimizers = make_optimizer(model), make_optimizer(eager)
    for one, optimizer in zip((model, eager), optimizers, strict=True):
        eager_step(one, optimizer, batch_of(0))

    with parallelize(model, loss_of, batch_of(0), optimizers[0], mesh=2) as step:
        eager_step(eager, optimizers[1], batch_of(1))
        step(batch_of(1))

        assert_trained_alike(step, eager, optimizers[1])
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    torch.testing.assert_close(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_strategy_can_be_passed_and_is_reported():
    def start(**chosen):
        model = make_model()
        return parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2, **chosen)

    strategy = start(planner="manual/zero").strategy
    assert isinstance(strategy, Strategy)
    step, out = start(planner=strategy), io.StringIO()
    step.report(out)

    assert replace(step.strategy, report=strategy.report) == strategy
    assert "planner manual: 2 ranks, 1 micro-batch" in out.getvalue()
    assert "predicted time of a step" in out.getvalue()
    with pytest.raises(ConfigError, match="pins are given with a strategy"):
        start(planner=strategy, pins={"batch": "B"})


def test_a_block_is_entered_once_and_states_are_there_afterwards():
    model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)
    with pytest.raises(RunError, match="not started"):
        step(batch_of(0))
    with step:
        step(batch_of(0))
        with pytest.raises(RunError, match="started before"):
            step.start()
    after = step.state_dict()

    assert "0.weight" in after
    with pytest.raises(RunError, match="closed"):
        step(batch_of(0))
    with pytest.raises(RunError, match="started before"), step:
        pass


def test_an_error_in_the_block_ends_it_and_is_the_one_that_is_raised():
    model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)

    with pytest.raises(KeyboardInterrupt), step:
        step(batch_of(0))
        raise KeyboardInterrupt

    with pytest.raises(RunError, match="closed"):
        step(batch_of(0))


def test_a_step_that_is_over_is_let_go_of_with_its_model():
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        step(batch_of(0))
        step.evaluate(batch_of(1))
    kept = [weakref.ref(one) for one in (step, step.session, model)]

    del step, model
    gc.collect()

    assert [one() for one in kept] == [None, None, None]
