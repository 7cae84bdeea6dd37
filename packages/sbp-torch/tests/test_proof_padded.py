"""A captured step beside the same step of a padded batch: what is equal, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_core.errors import SbpValueError
from sbp_core.graph import OutputKind
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.proof import OutputDifference, PaddedStep

WORDS = 5


class Model(nn.Module):
    def __init__(self, padding_index: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4, padding_index)
        self.gate, self.head = nn.Parameter(torch.zeros(())), nn.Linear(4, WORDS)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Tensor) -> Any:
        return self.head(self.embed(words))


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step_of(
    model: nn.Module, loss: Any = loss_of, label: int = -100, first: int | None = None
) -> PaddedStep:
    x = torch.tensor([[1, 2, 3], [4, 3, 1]])
    batch = {"x": x, "y": x * 2 % WORDS if first is None else torch.full_like(x, first)}
    padded = {"x": F.pad(x, (0, 2)), "y": F.pad(batch["y"], (0, 2), value=label)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before, after = (capture(model, loss, one, optimizer) for one in (batch, padded))
    return PaddedStep(before=before, after=after, batch=batch, padded=padded)


def differences(model: nn.Module, **given: Any) -> list[OutputDifference]:
    return step_of(model, **given).differences(lambda: initial_states(model))


def test_labels_that_are_ignored_change_nothing_and_others_do() -> None:
    torch.manual_seed(0)
    model = Model()

    assert differences(model) == []
    assert step_of(model).differences() == []  # of random parameters
    first = differences(model, label=0)[0]
    assert (first.name, first.kind) == ("loss", OutputKind.LOSS) and first.wanted != first.found


def test_known_values_are_taken_as_they_are() -> None:
    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return model.head(model.embed(batch["x"]).sum(1)).square().mean()

    torch.manual_seed(0)
    assert differences(Model(padding_index=0), loss=loss) == []  # whose row of padding is 0
    assert differences(Model(), loss=loss)


def test_a_gradient_and_a_buffer_that_differ_are_named() -> None:
    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        model.seen += batch["x"].numel()
        logits = logits + model.gate * logits.mean(1, keepdim=True)
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    torch.manual_seed(0)
    found = {one.name: one for one in differences(Model(), loss=loss)}

    assert found.keys() == {"seen", "gate", "gate.momentum_buffer"}
    assert (found["seen"].wanted, found["seen"].found) == (6, 10)


def test_what_cannot_be_run_is_said() -> None:
    model = Model()

    with pytest.raises(SbpValueError, match="it would take about"):
        step_of(model).differences(budget_s=1e-9)
    with pytest.raises(SbpValueError, match="the loss of the batch is no finite number"):
        differences(model, first=-100)
