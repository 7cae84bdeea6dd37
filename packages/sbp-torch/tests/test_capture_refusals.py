"""What `capture` is given in place of a program: said at once, with what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError, SbpTypeError
from sbp_torch.capture import capture, initial_states

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


@pytest.mark.parametrize(
    ("function", "batch", "what", "todo"),
    [
        (_chosen_by_value, _BATCH, "depends on the value of a tensor", "torch.where"),
        (loss, {"y": torch.zeros(2, 4)}, "KeyError: 'x'", "eager PyTorch"),
        (loss, None, "TypeError: 'NoneType' object", "eager PyTorch"),
        (loss, {"x": torch.zeros(2, 5)}, "must have same reduction dim", "eager PyTorch"),
        (lambda model, batch: model(batch["x"]), _BATCH, r"shape \(2, 1\)", "loss.mean()"),
    ],
)
def test_a_program_that_fails_is_answered_with_why(
    function: Callable[..., Any], batch: Any, what: str, todo: str
) -> None:
    with pytest.raises(CaptureError, match=what) as caught:
        capture(_MODEL, function, batch, torch.optim.SGD(_MODEL.parameters()))

    assert todo in caught.value.todo


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
