"""Models whose parts can be placed: two branches, and convolutions before large matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sbp_aten.passes import prepare_step
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.testing.programs import OneDeviceStep


class Branches(nn.Module):
    """A stem, two branches that do not use each other, and a head for their product."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def loss(self, batch):
        left = right = self.stem(batch["x"]).tanh()
        for layer in self.left:
            left = layer(left).tanh()
        for layer in self.right:
            right = layer(right).tanh()
        return self.head(left * right).square().mean()


class Convolutions(nn.Module):
    """Few parameters on large images, then many on few features."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 8), (8, 8))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairs)
        self.wide, self.head = nn.Linear(8 * 8 * 8, 128), nn.Linear(128, 5)

    def loss(self, batch):
        x = batch["x"]
        for conv in self.convs:
            x = conv(x).relu()
        x = self.wide(functional.max_pool2d(x, 2).flatten(1)).relu()
        return functional.cross_entropy(self.head(x), batch["y"])


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def features(count, seed):
    """Return so many samples for `Branches`."""
    return {"x": torch.randn(count, 64, generator=_generator(seed), dtype=torch.float64)}


def images(count, seed):
    """Return so many samples for `Convolutions`."""
    return {
        "x": torch.randn(count, 3, 16, 16, generator=_generator(seed), dtype=torch.float64),
        "y": torch.randint(5, (count,), generator=_generator(seed)),
    }


def captured(model, batch, num_micro_batches=1, micro_batch_size=8):
    """Return the training step of a model in float64."""
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    example = batch(micro_batch_size, 0)
    graph = capture(model, lambda model, batch: model.loss(batch), example, optimizer)
    return OneDeviceStep(
        graph=prepare_step(graph, num_micro_batches),
        states=initial_states(model, optimizer),
        batches=tuple(batch(num_micro_batches * micro_batch_size, 1 + at) for at in range(2)),
        scalars={"lr": 1e-2},
    )
