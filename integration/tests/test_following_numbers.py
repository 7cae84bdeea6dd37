"""Floats that a loop changes and forward reads are inputs of the step, or forms by their value."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbp_core.errors import RunError
from sbp_launch import parallelize

LAYOUTS = (
    {},
    {"mesh": 4, "planner": "manual/zero"},
    {"mesh": (2, 2), "micro_batches": 2, "pins": {"body.weight": {"tensor": "S(0)"}}},
    {"mesh": 2, "axes": "pipe", "micro_batches": 4, "planner": "manual/pipeline"},
)


def batch(index, size=8):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "noise": torch.randn(size, 3, generator=generator, dtype=torch.float64)}


class Vae(nn.Module):
    """A small variational autoencoder, and a temperature of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.mean, self.scale = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.head = nn.Linear(3, 6)
        self.temperature = 1.0

    def forward(self, x, noise):
        hidden = self.body(x).tanh()
        mean, log_scale = self.mean(hidden), self.scale(hidden)
        made = self.head((mean + noise * log_scale.exp()).tanh()) / self.temperature
        return made, (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1) / 2


class Twins:
    """One program by `parallelize`, and one by plain PyTorch; they share the numbers `of`."""

    def __init__(self, loss=None):
        torch.manual_seed(0)
        self.of = SimpleNamespace(beta=0.0, gamma=1.0)
        self.models = [Vae().double()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        of = self.of

        def elbo(model, batch):
            made, divergence = model(batch["x"], batch["noise"])
            error = (made - batch["x"]).square().mean()
            return of.gamma * error + of.beta * divergence.mean()

        self.loss = elbo if loss is None else lambda model, batch: loss(of, model, batch)

    def start(self, **layout):
        return parallelize(self.models[0], self.loss, batch(0), self.optimizers[0], **layout)

    def step(self, step, index, size=8):
        """Take a step with both, whose losses are equal."""
        found = float(step(batch(index, size)))
        self.optimizers[1].zero_grad()
        wanted = self.loss(self.models[1], batch(index, size))
        wanted.backward()
        self.optimizers[1].step()
        assert found == pytest.approx(wanted.item(), rel=0, abs=1e-12, nan_ok=True)

    def assert_equal(self):
        found, wanted = (model.state_dict() for model in self.models)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_annealing_takes_two_forms(layout):
    twins = Twins()

    with twins.start(**layout) as step:
        for index in range(200):
            twins.of.beta = min(1.0, index / 100)
            twins.step(step, index)
        assert len(step.forms) == 2
        assert step.evaluate(batch(0)).loss == pytest.approx(
            twins.loss(twins.models[1], batch(0)).item(), abs=1e-11
        )
        twins.assert_equal()
    twins.assert_equal()
