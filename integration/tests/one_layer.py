"""A layer that `parallelize` trains beside one that plain PyTorch does, for tests of changes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sbp_launch import parallelize


class Twins:
    """A layer that `parallelize` trains, and one that plain PyTorch does."""

    def __init__(self, prepare=lambda model: None):
        torch.manual_seed(0)
        self.models = [nn.Linear(6, 3).double()]
        self.models.append(copy.deepcopy(self.models[0]))
        for model in self.models:
            prepare(model)
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in self.models]
        self.batch = torch.randn(8, 6, dtype=torch.float64)

    def trains(self, losses, *changes):
        """Take a step, and another one after each change; losses and weights are equal."""
        found = parallelize(self.models[0], losses[0], self.batch, self.optimizers[0], mesh=2)
        with found as step:
            for change in (None, *changes):
                if change is not None:
                    change()
                self.optimizers[1].zero_grad()
                wanted = losses[1](self.models[1], self.batch)
                wanted.backward()
                self.optimizers[1].step()
                assert abs(float(step(self.batch)) - wanted.item()) <= 1e-12
            for one, other in zip(*(model.parameters() for model in self.models), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
