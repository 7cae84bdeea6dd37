"""Points on a circle, and a network that predicts their noise."""

import torch
from torch import nn

STEPS = 20
ALPHAS = torch.cumprod(1 - torch.linspace(1e-3, 0.3, STEPS), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 32)
        self.inner = nn.Linear(2, 32)
        self.outer = nn.Sequential(nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        return self.outer(self.inner(x) + self.time(t))


def circle(count):
    angle = 6.2832 * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def sample(model, count):
    x = torch.randn(count, 2)
    for t in reversed(range(STEPS)):
        before = ALPHAS[t - 1] if t else torch.ones(())
        noise = model(x, torch.full((count,), t))
        clean = (x - (1 - ALPHAS[t]).sqrt() * noise) / ALPHAS[t].sqrt()
        x = before.sqrt() * clean + (1 - before).sqrt() * noise
    return x
