"""Capture needs shapes only: parameters that no machine holds are captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from sbp_torch.graph_capture import capture

#: Bytes of such a parameter: 2**44.
WIDE = 2**40

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
}


class Table(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight).square().sum()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_a_table_beyond_memory_are_captured(name: str) -> None:
    batch, found = torch.zeros(2, dtype=torch.int64), []
    for rows in (8, WIDE):
        with torch.device("meta"):
            model = Table(rows)
        optimizer = OPTIMIZERS[name](model.parameters())
        found.append(capture(model, loss, batch, optimizer))

    small, large = found
    assert [entry.name for entry in large.inputs] == [entry.name for entry in small.inputs]
    for entry in small.inputs:
        if small.is_tensor(entry.name):
            shape = tuple(WIDE if one == 8 else one for one in small.tensor(entry.name).shape)
            assert large.tensor(entry.name).shape == shape


class Branching(optim.Optimizer):
    """Reads the norm of a parameter, and divides by it."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p[0] if p.norm().item() >= 0 else p)
                scale = 1 / p.norm().clamp(min=1)
                state["mean"].add_(p.grad[0])
                p.sub_(scale * group["lr"] * state["mean"])


def test_an_optimizer_of_the_users_that_reads_a_norm_needs_no_values() -> None:
    with torch.device("meta"):
        model = Table(WIDE)
    batch = torch.zeros(2, dtype=torch.int64)

    graph = capture(model, loss, batch, Branching(model.parameters()))

    assert graph.tensor("weight.mean").shape == (4,)
