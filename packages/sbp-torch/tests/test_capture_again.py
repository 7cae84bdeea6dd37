"""A program that is being trained is captured again as it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sbp_core.graph import graph_hash
from sbp_torch.graph_capture import capture


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


class Counting(torch.optim.Optimizer):
    """Counts its steps in Python numbers, as optimizers did before PyTorch 1.12."""

    def __init__(self, params: object, *, reads: bool) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]
        self.reads = reads

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                scale = math.sqrt(1 - 0.9 ** state["step"]) if self.reads else 1.0
                p.add_(state["m"], alpha=-group["lr"] * scale)


@pytest.mark.parametrize("reads", [True, False])
def test_python_numbers_that_training_shows_as_tensors_are_numbers(reads: bool) -> None:
    """Another size of batch was refused, or the step was said to be another one."""
    model, batch = nn.Linear(4, 2), {"x": torch.randn(8, 4)}
    optimizer = Counting(model.parameters(), reads=reads)
    before = capture(model, loss, batch, optimizer)
    for p in model.parameters():
        count = torch.tensor(3.0, dtype=torch.float64)
        optimizer.state[p] = {"m": torch.zeros_like(p), "step": count}

    again = capture(model, loss, batch, optimizer)

    assert graph_hash(again) == graph_hash(before)
