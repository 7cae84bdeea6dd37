"""Checkpoints of a model of which other modules are wrapped: the states go on under its names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sbp_core.errors import SbpError
from sbp_launch import parallelize
from sbp_torch.graph_capture import UpdateOptions

BATCH = torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)
    ).double()


def wrapped_model(how: str) -> nn.Module:
    model = plain_model()
    if how == "compile":
        model[0] = torch.compile(model[0], backend="eager")
    elif how == "checkpoint":
        model[3] = checkpoint_wrapper(model[3])
    elif how == "both":
        model[0] = checkpoint_wrapper(torch.compile(model[0], backend="eager"))
    elif how == "whole":
        return torch.compile(model, backend="eager")
    return model


def loss_of(model, batch):
    return model(batch).square().mean()


def begin(model: nn.Module, **layout):
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    update = UpdateOptions(ema_decay=0.9)
    return parallelize(model, loss_of, BATCH, optimizer, update=update, **layout)


def without(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@pytest.mark.parametrize(
    ("before", "after"),
    [("plain", "compile"), ("checkpoint", "plain"), ("both", "checkpoint"), ("whole", "plain")],
)
def test_a_checkpoint_goes_on_whatever_wraps_modules(before, after, tmp_path):
    with begin(wrapped_model(before), mesh=2, planner="manual/zero") as step:
        step(BATCH)
        step.save(tmp_path)
        saved = step.state_dict()
        wanted = [float(step(BATCH)) for _ in range(3)]
        last = step.state_dict()

    model = wrapped_model(after)
    with begin(model, mesh=2, planner="manual/zero") as step:
        names = {name for name, _ in model.named_parameters()}
        step.load(tmp_path)
        found = {without(name): value for name, value in step.state_dict().items()}
        losses = [float(step(BATCH)) for _ in range(3)]
        after_three = {without(name): value for name, value in step.state_dict().items()}
        assert names <= step.state_dict().keys()
        (group,) = step._program.optimizer.param_groups
        assert {*group["param_names"]} == names

    assert {without(name) for name in saved} == found.keys()
    assert any(name.endswith(".ema") for name in found)
    assert any(name.endswith(".exp_avg_sq") for name in found)
    for name, value in saved.items():
        assert found[without(name)].equal(value), name
    assert losses == wanted
    for name, value in last.items():
        assert after_three[without(name)].equal(value), name


def test_a_state_dict_goes_on_whatever_wraps_modules():
    with begin(wrapped_model("both"), mesh=2) as step:
        step(BATCH)
        saved = step.state_dict()
    with begin(plain_model(), mesh=1) as step:
        step(BATCH)
        step.load_state_dict(saved)
        found = step.state_dict()

    assert {without(name): value.tolist() for name, value in saved.items()} == {
        name: value.tolist() for name, value in found.items()
    }


def test_states_of_a_layer_that_is_frozen_here_are_kept_under_its_name(tmp_path):
    found = []
    for before in ("plain", "compile"):
        with begin(wrapped_model(before)) as step:
            step(BATCH)
            step.save(tmp_path / before)
        model = plain_model()
        model[0].requires_grad_(False)
        with begin(model) as step:
            step.load(tmp_path / before)
            model[0].requires_grad_(True)
            step(BATCH)
            found.append(step.state_dict())

    assert found[0].keys() == found[1].keys()
    assert "0.weight.exp_avg" in found[0]
    assert float(found[0]["0.weight.step"]) == 2  # it is not begun anew
    for name, value in found[0].items():
        assert found[1][name].equal(value), name


class Two(nn.Module):
    """A module whose own parts are called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.double))
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.ones(4, dtype=torch.double))

    def forward(self, x):
        return x * self.weight + self.module.weight


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Module()
        self._orig_mod.weight = nn.Parameter(torch.ones(4, dtype=torch.double))

    def forward(self, x):
        return x * self._orig_mod.weight


@pytest.mark.parametrize(("before", "after"), [(Two, One), (One, Two)])
def test_what_could_be_two_is_refused_by_name(before, after, tmp_path):
    with begin(before()) as step:
        step(BATCH)
        step.save(tmp_path)

    with begin(after()) as step, pytest.raises(SbpError, match="weight") as caught:
        step.load(tmp_path)

    assert "no state is called" in caught.value.what
    with begin(before()) as step:  # its own names are taken as they are
        step.load(tmp_path)
        assert step.steps_done == 1
