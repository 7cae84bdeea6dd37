"""The program of `test_following`: it runs as one rank of two, and changes something between steps.

For each change it starts a step, and prints what it was told as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sbp_core.errors import SbpError
from sbp_launch import parallelize

RANK = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def _zero(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.zero_()


class Case:
    """A model in training, whose loss reads `beta`."""

    def __init__(self, planner: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 2)
        ).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.beta = 1.0
        self.batch = {"x": torch.ones(4, 4).double(), "y": torch.zeros(4, 2).double()}
        self.step = parallelize(self.model, self.loss, self.batch, self.optimizer, planner=planner)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean() * self.beta

    def cut(self) -> None:
        """Leave out half of the batch."""
        self.batch = {name: value[:2] for name, value in self.batch.items()}

    def plain(self, change: Callable[[Case], object]) -> float:
        """Return the loss of plain PyTorch behind a change."""
        for index in range(3):
            if index == 2:
                change(self)
            self.optimizer.zero_grad()
            loss = self.loss(self.model, self.batch)
            loss.backward()
            self.optimizer.step()
        return loss.item()


#: What is changed, on which ranks, and under which planner.
CHANGES: dict[str, tuple[Callable[[Case], object], tuple[int, ...], str]] = {
    "beta here": (lambda case: setattr(case, "beta", 2.0), (1,), "manual/data_parallel"),
    "beta everywhere": (lambda case: setattr(case, "beta", 2.0), (0, 1), "manual/zero"),
    "beta of each": (
        lambda case: setattr(case, "beta", 2.0 + RANK),
        (0, 1),
        "manual/data_parallel",
    ),
    "mode here": (lambda case: case.model.eval(), (1,), "manual/zero"),
    "a size here": (lambda case: case.cut(), (1,), "manual/zero"),
    "a size everywhere": (lambda case: case.cut(), (0, 1), "manual/zero"),
    "frozen everywhere": (
        lambda case: case.model[0].requires_grad_(False),
        (0, 1),
        "manual/zero",
    ),
    "a module here": (
        lambda case: case.model.__setitem__(0, nn.Linear(4, 4).double()),
        (1,),
        "manual/data_parallel",
    ),
    "rate here": (
        lambda case: case.optimizer.param_groups[0].update(lr=0.2),
        (1,),
        "manual/zero",
    ),
    "batch here": (lambda case: case.batch["x"].add_(1), (0,), "manual/data_parallel"),
    "weights here": (lambda case: _zero(case.model), (1,), "manual/data_parallel"),
    "weights everywhere": (lambda case: _zero(case.model), (0, 1), "manual/data_parallel"),
    "momentum everywhere": (
        lambda case: case.optimizer.state.clear(),
        (0, 1),
        "manual/data_parallel",
    ),
    "shards everywhere": (lambda case: _zero(case.model), (0, 1), "manual/zero"),
    "whole from shards": (
        lambda case: (case.step.copy_to(case.model, case.optimizer), _zero(case.model)),
        (0, 1),
        "manual/zero",
    ),
}


def told(name: str) -> str:
    """Return what a rank is told, or how far its loss is from plain PyTorch."""
    change, ranks, planner = CHANGES[name]
    case: Any = Case(planner)
    try:
        with case.step as step:
            for _ in range(2):
                step(case.batch)
            if RANK in ranks:
                change(case)
            found = float(step(case.batch))
    except SbpError as error:
        return f"{type(error).__name__}: {error}"
    twin: Any = Case(planner)
    twin.step = _Nothing()
    return f"off by {abs(found - twin.plain(change)):.0e}"


class _Nothing:
    def copy_to(self, *_: object) -> None:
        """Do nothing: a model of plain PyTorch is what it trains."""


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        line = {"rank": RANK, "change": chosen, "said": told(chosen)}
        print(json.dumps(line), flush=True)
