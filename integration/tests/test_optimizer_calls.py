"""`optimizer.step()` that was left in a loop, beside the step that has taken the update."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sbp_core.errors import CaptureError
from sbp_launch import parallelize

BATCH = torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
TOLD = "step(batch) does forward, backward and update; leave this call out"


class Own(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def loss_of(model, batch):
    return model(batch).square().mean()


def made(kind=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    return model, kind(model.parameters(), lr=0.1)


def values(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_call_without_gradients_changes_nothing_and_is_told_once(kind, caplog):
    model, optimizer = made(kind)
    plain, other = copy.deepcopy((model, optimizer))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    wanted = torch.optim.lr_scheduler.StepLR(other, 2, 0.5)

    with parallelize(model, loss_of, BATCH, optimizer, mesh=2) as step:
        for _ in range(4):
            optimizer.zero_grad()
            step(BATCH)
            optimizer.step()
            schedule.step()
            other.zero_grad()
            loss_of(plain, BATCH).backward()
            other.step()
            wanted.step()
        torch.testing.assert_close(values(model), values(plain), rtol=0, atol=1e-12)

    (told,) = (one.message for one in caplog.records if TOLD in one.message)
    assert told.startswith(
        f"{kind.__name__}.step() was called in addition to the step of parallelize, and"
    )
    assert "changes nothing" in told


def test_a_second_update_by_gradients_of_the_loop_is_told_and_followed(caplog):
    model, optimizer = made()
    plain, other = copy.deepcopy((model, optimizer))

    with parallelize(model, loss_of, BATCH, optimizer, mesh=2) as step:
        step(BATCH)
        loss_of(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = float(step(BATCH))
    for _ in range(2):
        other.zero_grad()
        loss_of(plain, BATCH).backward()
        other.step()

    assert abs(found - loss_of(plain, BATCH).item()) <= 1e-12  # behind two updates
    assert "updates its parameters once more, by gradients of a backward of the loop" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.SGD, Own])
def test_steps_that_nobody_calls_are_not_told(kind, caplog):
    model, optimizer = made(kind)

    optimizer.step()
    step = parallelize(model, loss_of, BATCH, optimizer, mesh=2, compare_steps=2)
    optimizer.step()
    with step:
        for _ in range(3):
            step(BATCH)
        step(BATCH[:6])  # captured anew
    if kind is not Own:  # which asks for gradients itself, and is answered
        optimizer.step()

    assert TOLD not in caplog.text
    assert not optimizer._optimizer_step_pre_hooks
    with parallelize(model, loss_of, BATCH, optimizer) as step:  # which has no hook of the user's
        step(BATCH)


def test_the_optimizer_of_a_step_beside_is_told_of_too(caplog):
    pair = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}).double()
    optimizers = {name: torch.optim.SGD(pair[name].parameters(), lr=0.1) for name in pair}

    def loss(name):
        return lambda pair, batch: pair[name](batch).square().mean()

    with parallelize(pair, loss("a"), BATCH, optimizers["a"]) as step:
        second = step.add_step(loss("b"), BATCH, optimizers["b"])
        step(BATCH)
        second(BATCH)
        optimizers["b"].step()

    assert TOLD in caplog.text


def test_a_hook_of_the_user_is_still_refused():
    model, optimizer = made()
    optimizer.register_step_pre_hook(lambda *_: None)

    with pytest.raises(CaptureError, match="has a hook on its steps, by register_step_pre_hook"):
        parallelize(model, loss_of, BATCH, optimizer)
