"""What is given to `parallelize` in place of a model, a loss or an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sbp_core.errors import ConfigError, SbpTypeError
from sbp_launch.step.argument_types import check_loss, check_model, check_optimizer

_MODEL = nn.Linear(2, 1)
_ADAM = torch.optim.Adam(_MODEL.parameters())
_ORDER = r"parallelize\(model, loss, batch, optimizer\)"


def loss(model, batch):
    return model(batch).mean()


@pytest.mark.parametrize(
    ("check", "given", "what", "todo"),
    [
        (check_model, [_MODEL, _MODEL], "model is of type list", "ModuleDict"),
        (check_model, {"actor": _MODEL}, "model is of type dict", "ModuleDict"),
        (check_model, nn.Linear, "model is the class Linear", r"Linear\(\.\.\.\)"),
        (check_model, _ADAM, "model is of type Adam", _ORDER),
        (check_model, loss, "model is of type function", _ORDER),
        (check_model, None, "model is None", "the module"),
        (check_loss, {"x": torch.ones(1)}, "loss is of type dict", _ORDER),
        (check_loss, torch.ones(()), "loss is of type Tensor", "lambda model, batch"),
        (check_optimizer, [_ADAM, _ADAM], "optimizer is of type list", "CombinedOptimizer"),
        (check_optimizer, {"a": _ADAM}, "optimizer is of type dict", r"step\.add_step"),
        (check_optimizer, [*_MODEL.parameters()], "type list", r"AdamW\(model\.parameters"),
        (check_optimizer, _MODEL.parameters(), "generator", r"AdamW\(model\.parameters"),
        (check_optimizer, torch.optim.Adam, "the class Adam", r"Adam\(model\.parameters"),
        (check_optimizer, _MODEL, "optimizer is of type Linear", _ORDER),
        (check_optimizer, None, "optimizer is None", r"torch\.optim"),
        (
            check_optimizer,
            torch.optim.lr_scheduler.StepLR(torch.optim.SGD(_MODEL.parameters(), lr=0.1), 1),
            "optimizer is of type StepLR",
            "pass the optimizer of the scheduler",
        ),
    ],
)
def test_an_argument_of_another_type_is_told_what_to_pass(check, given, what, todo):
    with pytest.raises(ConfigError, match=rf"{what}(.|\n)*{todo}") as caught:
        check(given)

    assert caught.value.where[0].startswith("the argument ")


def test_models_losses_and_optimizers_are_taken():
    check_model(nn.Sequential(_MODEL))
    check_loss(loss)
    check_loss(_MODEL)
    check_optimizer(_ADAM)
    with pytest.raises(SbpTypeError, match="model is wrapped"):
        check_model(nn.DataParallel(_MODEL))
