"""The program of `test_row_updates`: tables that are updated by row, as a process or with threads.

Each layout trains a small model by `parallelize` and by plain PyTorch, and returns the largest
deviation of losses, parameters and states. As a program, it runs as one rank of two and prints them
as a line of JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import nn

from sbp_launch import parallelize
from sbp_launch.world import World
from sbp_torch.optim import CombinedOptimizer, RowWiseAdagrad

WIDTH, BATCH, PLACES, STEPS = 4, 8, 3, 3

#: Layouts on two ranks, so that two processes can take them; `rows` of each table, by default 7.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"planner": "manual/data_parallel"},
    "data, micro-batches": {"planner": "manual/data_parallel", "micro_batches": 2},
    "sharded states": {"planner": "manual/zero"},
    "sharded states, clipped": {
        "planner": "manual/zero",
        "micro_batches": 2,
        "update": {"clip_norm": 0.05},
    },
    "tables": {"planner": "manual/table_parallel", "mesh": {"tensor": 2}, "rows": 1000},
    "pipeline": {"planner": "manual/pipeline", "mesh": {"pipe": 2}, "micro_batches": 4},
    "rows": {"pins": {"*table*.weight": "S(0)", "*table*.weight.*": "S(0)"}},
    "columns": {"pins": {"*table*.weight": "S(1)"}},
    "whole": {"pins": {"*table*.weight": "B"}},
}

#: Further layouts for threads: uneven shards, and ranks without a row.
WIDER: dict[str, dict[str, Any]] = {
    "3 ranks": {"planner": "manual/zero", "mesh": 3},
    "3 ranks, micro-batches": {"planner": "manual/zero", "mesh": 3, "micro_batches": 2},
    "more ranks than rows": {"pins": {"*table*.weight": "S(0)"}, "mesh": 8, "rows": 5},
    "data, tables": {"planner": "propagate", "mesh": {"data": 2, "tensor": 2}},
    "pipeline, data": {
        "planner": "manual/pipeline",
        "mesh": {"pipe": 2, "data": 2},
        "micro_batches": 2,
    },
}

#: Optimizers that update single rows: name -> makers of those of tables, and of the rest.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "row-wise adagrad": lambda p: RowWiseAdagrad(p, lr=0.3),
    "sparse adam": None,
}


class Wide(nn.Module):
    """Two tables of 7 rows, the first of which has a padding row, and two layers."""

    def __init__(self, sparse: bool, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=1, sparse=sparse)
        self.table_of_bags = nn.EmbeddingBag(rows, WIDTH, mode="mean", sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(2 * WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bag = self.table_of_bags(x)
        made: torch.Tensor = self.layers(torch.cat([self.table(x).sum(1), bag], 1)).squeeze(1)
        return made


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(index: int, rows: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(index)
    return {
        "x": torch.randint(0, rows, (BATCH, PLACES), generator=draw),
        "y": torch.randn(BATCH, generator=draw, dtype=torch.float64),
    }


def optimizers_of(model: Wide, name: str) -> list[torch.optim.Optimizer]:
    if name != "sparse adam":
        return [OPTIMIZERS[name](model.parameters())]
    tables = [*model.table.parameters(), *model.table_of_bags.parameters()]
    dense = model.layers.parameters()
    return [torch.optim.SparseAdam(tables, lr=0.3), torch.optim.Adam(dense, lr=0.3)]


def trained(name: str, optimizer: str) -> dict[str, Any]:
    """Return the deviation from PyTorch, losses bit for bit, and the number of updates by row."""
    layout = {"mesh": 2, **(LAYOUTS | WIDER)[name]}
    rows = layout.pop("rows", 7)
    torch.manual_seed(0)
    model = Wide(optimizer == "sparse adam", rows).double()
    twin = copy.deepcopy(model)
    own, theirs = optimizers_of(model, optimizer), optimizers_of(twin, optimizer)
    made = own[0] if len(own) == 1 else CombinedOptimizer(own)
    settings = {"passes": {"update_rows": {"when": "always"}}}
    losses, worst = [], 0.0
    with parallelize(model, loss_of, batch(0, rows), made, compile=settings, **layout) as step:
        for index in range(STEPS):
            given = batch(index, rows)
            losses.append(step(given).item())
            for one in theirs:
                one.zero_grad()
            wanted = loss_of(twin, given)
            wanted.backward()
            if "update" in layout:
                for p in twin.parameters():  # PyTorch clips dense gradients only
                    p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                nn.utils.clip_grad_norm_(twin.parameters(), layout["update"]["clip_norm"])
                for p in (twin.table.weight, twin.table_of_bags.weight):
                    p.grad = p.grad.to_sparse(1) if optimizer == "sparse adam" else p.grad
            for one in theirs:
                one.step()
            worst = max(worst, abs(losses[-1] - wanted.item()))
        states = step.state_dict()
        by_row = sum(node.op == "sbp.row_update" for node in step.graph.nodes)
    for key, value in twin.state_dict().items():
        worst = max(worst, float((states[key] - value).abs().max()))
    for one in theirs:
        for group in one.param_groups:
            names = {id(p): key for key, p in twin.named_parameters()}
            for p in group["params"]:
                for key, value in one.state[p].items():
                    full = f"{names[id(p)]}.{key}"
                    if key != "step" and full in states:
                        worst = max(worst, float((states[full] - value).abs().max()))
    return {"worst": worst, "losses": [one.hex() for one in losses], "by row": by_row}


if __name__ == "__main__":
    found = {name: trained(name, sys.argv[1]) for name in sys.argv[2:]}
    print(json.dumps({"rank": World.of_environment().rank, **found}), flush=True)
