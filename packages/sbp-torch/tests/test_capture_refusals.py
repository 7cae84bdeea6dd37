"""What `capture` is given in place of a program: said at once, with what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError, SbpTypeError
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.guards import Guard

_MODEL = nn.Linear(4, 1)
_BATCH = {"x": torch.zeros(2, 4)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


@pytest.mark.parametrize(
    ("model", "function", "optimizer", "what"),
    [
        (nn.Linear, loss, None, "model is the class Linear"),
        (lambda x: x, loss, None, "model is of type function"),
        (_MODEL, None, None, "loss is of type NoneType"),
        (_MODEL, nn.MSELoss(), None, "loss is of type MSELoss"),
        (_MODEL, loss, torch.optim.SGD, "optimizer is the class SGD"),
        (_MODEL, loss, 0.1, "optimizer is of type float"),
    ],
)
def test_arguments_of_another_type_are_refused(
    model: Any, function: Any, optimizer: Any, what: str
) -> None:
    with pytest.raises(SbpTypeError, match=what) as caught:
        capture(model, function, _BATCH, optimizer)

    assert caught.value.accepted


def test_states_are_those_of_a_model_and_an_optimizer() -> None:
    with pytest.raises(SbpTypeError, match="optimizer is of type int"):
        initial_states(_MODEL, 3)  # type: ignore[arg-type]


def _chosen_by_value(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y: Tensor = model(batch["x"])
    return y.mean() if y.sum() > 0 else y.sum()


def _decayed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    decayed: Tensor = sum(one.square().sum() * one.decay for one in model.parameters())  # type: ignore[assignment, misc] # a mistake of users
    return loss(model, batch) + decayed


def _with_number(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    return loss(model, batch), {"beta": 0.5}


@pytest.mark.parametrize(
    ("function", "batch", "what", "todo"),
    [
        (_chosen_by_value, _BATCH, "depends on the value of a tensor", "torch.where"),
        (loss, {"y": torch.zeros(2, 4)}, "KeyError: 'x'", "eager PyTorch"),
        (loss, None, "TypeError: 'NoneType' object", "eager PyTorch"),
        (loss, {"x": torch.zeros(2, 5)}, "must have same reduction dim", "eager PyTorch"),
        (lambda model, batch: model(batch["x"]), _BATCH, r"shape \(2, 1\)", "loss.mean()"),
        (_decayed, _BATCH, "has no attribute 'decay'", "on a module, or pass it in the batch"),
        (_with_number, _BATCH, "metric 'beta' is float", "{'beta': beta * torch.ones(())}"),
    ],
)
def test_a_program_that_fails_is_answered_with_why(
    function: Callable[..., Any], batch: Any, what: str, todo: str
) -> None:
    with pytest.raises(CaptureError, match=what) as caught:
        capture(_MODEL, function, batch, torch.optim.SGD(_MODEL.parameters()))

    assert todo in caught.value.todo


def test_a_number_times_a_tensor_is_a_metric() -> None:
    """As the refusal of a plain number says."""

    def with_tensor(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(model, batch), {"beta": 0.5 * torch.ones(())}

    assert "beta" in {entry.name for entry in capture(_MODEL, with_tensor, _BATCH).outputs}


def test_a_parameter_of_the_optimizer_alone_is_told_with_its_shape_and_group() -> None:
    log_alpha = nn.Parameter(torch.zeros(3, 1))
    groups = [{"params": [*_MODEL.parameters()]}, {"params": [log_alpha]}]

    with pytest.raises(CaptureError, match=r"of shape \(3, 1\), in its group 1") as caught:
        capture(_MODEL, loss, _BATCH, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(CaptureError, match=r"of shape \(2, 4\), in its group 0") as other:
        capture(_MODEL, loss, _BATCH, torch.optim.SGD(nn.Linear(4, 2).parameters()))

    assert "model.log_alpha = nn.Parameter(...)" in caught.value.todo
    assert "of the model that is passed" in other.value.todo


def test_a_network_that_the_loss_calls_is_told_to_be_a_module_of_the_model() -> None:
    teacher = nn.Linear(4, 5000)

    def distilled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch["x"]).mean(1, keepdim=True)
        return nn.functional.mse_loss(model(batch["x"]), wanted)

    with pytest.raises(CaptureError, match=r"constant tensor of shape \(5000, 4\)") as caught:
        capture(_MODEL, distilled, _BATCH)

    assert Path(__file__).name in caught.value.where[0]
    assert "nn.ModuleDict({'student': model, 'teacher': teacher})" in caught.value.todo


class _Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as many do: without `Optimizer.__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_that_wraps_another_is_told_what_to_pass() -> None:
    optimizer = _Lookahead(torch.optim.SGD(_MODEL.parameters()))

    Guard(_MODEL, loss, optimizer)
    with pytest.raises(CaptureError, match=r"_Lookahead\.base holds SGD") as caught:
        capture(_MODEL, loss, _BATCH, optimizer)

    assert "pass the inner one" in caught.value.todo


def _of_batch(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"].mean()


def _of_three(model: nn.Module, batch: dict[str, Tensor], scale: float) -> Tensor:
    return scale * loss(model, batch)


class _Called:
    """A loss that keeps what it needs."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        return _of_batch(batch)

    def of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (_of_batch, "(batch"),
        (_of_three, "(model"),
        (lambda *, model, batch: loss(model, batch), "(*, model, batch)"),
        (partial(_of_three, scale=2.0, batch=_BATCH), "(model"),
        (_Called(), "(batch"),
        (_Called().__call__, "(batch"),
    ],
)
def test_a_loss_of_other_arguments_is_told_what_it_is_called_with(
    function: Callable[..., Any], signature: str
) -> None:
    with pytest.raises(SbpTypeError, match=r"is called as loss\(model, batch\)") as caught:
        capture(_MODEL, function, _BATCH)

    assert caught.value.what.startswith(f"loss takes {signature}")
    assert Path(__file__).name in caught.value.where[0]


class _AsModule(nn.Module):
    """A loss that is a module."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch)


class _Static:
    """A loss without a self, which `inspect.signature` takes for one with it."""

    @staticmethod
    def __call__(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch)


@wraps(_of_batch)
def _wrapping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch)


def _claiming(*given: Any) -> Tensor:
    return loss(*given)


_claiming.__signature__ = inspect.signature(_of_batch)  # type: ignore[attr-defined] # as decorators do


@pytest.mark.parametrize(
    "function",
    [
        _wrapping,
        _claiming,
        partial(_of_three, scale=2.0),
        lambda model, batch, scale=2.0: _of_three(model, batch, scale),
        _Called().of,
        partial(_claiming),
        _Static(),
        _AsModule(),
    ],
)
def test_a_loss_is_taken_if_it_can_be_called(function: Callable[..., Any]) -> None:
    assert capture(_MODEL, function, _BATCH).nodes


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_loss_that_freezes_or_unfreezes_is_refused(is_trained: bool) -> None:
    """Gradients would be of other parameters than in plain PyTorch, without a word."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(not is_trained)

    def switches(model: nn.Sequential, batch: dict[str, Tensor]) -> Tensor:
        model[0].requires_grad_(is_trained)
        return loss(model, batch)

    told = f"{'unfreezes' if is_trained else 'freezes'} '0.weight'"
    with pytest.raises(CaptureError, match=rf"{told}(.|\n)*requires_grad_\({is_trained}\)"):
        capture(model, switches, _BATCH, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model[0].weight.requires_grad is not is_trained


def test_a_loss_may_freeze_for_a_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def freezes(model: nn.Sequential, batch: dict[str, Tensor]) -> Tensor:
        model[1].requires_grad_(False)
        found = loss(model, batch)
        model[1].requires_grad_(True)
        return found

    graph = capture(model, freezes, _BATCH, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {"0.weight", "0.bias"} == {*graph.new_states}


def test_a_loss_that_is_scaled_is_named_and_a_scaler_that_is_off_is_none() -> None:
    def scaled(enabled: bool) -> Any:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return lambda model, batch: scaler.scale(loss(model, batch))

    optimizer = torch.optim.SGD(_MODEL.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=r"scaled by a GradScaler(.|\n)*LossScaling\(\)"):
        capture(_MODEL, scaled(enabled=True), _BATCH, optimizer)
    assert capture(_MODEL, scaled(enabled=False), _BATCH, optimizer).nodes
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert scaler.scale(torch.ones(())).item() == 2.0  # behind the capture it scales


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (torch.inference_mode, r"torch.inference_mode\(\), which has no gradients"),
        (torch.autograd.detect_anomaly, r"torch.autograd.detect_anomaly\(\) is on"),
    ],
)
def test_modes_in_which_no_step_is_taken_are_named(mode: Any, named: str) -> None:
    optimizer = torch.optim.SGD(_MODEL.parameters(), lr=0.1)
    with mode():
        with pytest.raises(CaptureError, match=named):
            capture(_MODEL, loss, _BATCH, optimizer)
        assert capture(_MODEL, loss, _BATCH).nodes  # forward and loss alone


def test_a_model_that_was_made_in_inference_mode_is_named() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 1)
    with pytest.raises(CaptureError, match=r"'weight' was made under torch.inference_mode\(\)"):
        capture(model, loss, _BATCH, torch.optim.SGD(model.parameters(), lr=0.1))
