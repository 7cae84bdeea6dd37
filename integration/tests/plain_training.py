"""A small model, its loss and optimizer, and steps of plain PyTorch, as a measure of others."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sbp_launch import MicroBatches
from sbp_torch.graph_capture import counted_random

SIZE = 8
LAYOUTS = (
    {},
    {"mesh": 2, "planner": "manual/zero"},
    # Batch normalisation takes its statistics of a micro-batch, which is another loss.
    {
        "mesh": (2, 2),
        "micro_batches": MicroBatches(2, loss="mean_of_micro_batches"),
        "pins": {"0.weight": {"tensor": "S(0)"}},
    },
    {
        "mesh": {"pipe": 2},
        "micro_batches": MicroBatches(4, loss="mean_of_micro_batches"),
        "planner": {"name": "manual/pipeline"},
    },
    {"mesh": 2, "planner": {"name": "osdp", "memory_bytes": 1e6}, "runtime": "reference"},
)


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )
    return nn.Sequential(*layers).double()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def batch_of(index: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    shapes = {"x": (size, 6), "y": (size, 4)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def loss_of(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return error.mean(), {"worst": error.amax()}


def eager_step(model, optimizer, batch, *, micro_batches=1, clip_norm=None, draw=0):
    """Take a step of plain PyTorch on the mean of micro-batches; return its loss."""
    optimizer.zero_grad()
    total, micro_batches = 0.0, MicroBatches.of(micro_batches).known_count
    size = len(batch["x"]) // micro_batches
    for index in range(micro_batches):
        part = {name: value[index * size :][:size] for name, value in batch.items()}
        with counted_random(0, draw * micro_batches + index):
            loss = loss_of(model, part)[0] / micro_batches
        loss.backward()
        total += loss.item()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return total


def assert_trained_alike(step, model, optimizer):
    """Compare every state of a parallel step with those of an eager model and optimizer."""
    own = copy.deepcopy(model)
    own_optimizer = make_optimizer(own)
    step.copy_to(own, own_optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], value, rtol=0, atol=1e-9)
    for parameter, twin in zip(model.parameters(), own.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(own_optimizer.state[twin][key], value, rtol=0, atol=1e-9)
