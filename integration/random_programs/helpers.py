"""Functions and modules that blocks call; a program's source contains a copy of the used ones."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class GradClamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


def frozen(module):
    return module.requires_grad_(False)


def hooked(h, hook):
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(hook)
    return h


def attend(q, k, v):
    places = torch.arange(q.shape[1])
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(places[:, None] < places, float("-inf"))
    return scores.softmax(-1) @ v


class Experts(nn.Module):
    """Two experts; the router selects the better one for each row."""

    def __init__(self, size):
        super().__init__()
        self.router = nn.Linear(size, 2)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(2))

    def forward(self, h):
        gates = self.router(h).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 2)
        parts = torch.stack([expert(h) for expert in self.experts], -1)
        return (parts * (gates * chosen).unsqueeze(-2)).sum(-1)


class Codes(nn.Module):
    """Returns the nearest of four trained codes, with a straight-through gradient."""

    def __init__(self, size):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, size))

    def forward(self, h):
        distances = (h.unsqueeze(-2) - self.codes).square().sum(-1)
        return h + (self.codes[distances.argmin(-1)] - h).detach() + 0.1 * self.codes.mean(0)


class MeanCodes(nn.Module):
    """Returns the nearest of four codes, which follow the mean of the rows assigned to them."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * size).view(4, size))

    def forward(self, h):
        rows = h.detach().reshape(-1, h.shape[-1])
        nearest = F.one_hot(torch.cdist(rows, self.codes).argmin(-1), 4).to(h.dtype)
        found = (nearest @ self.codes).view_as(h)
        means = nearest.T @ rows / nearest.sum(0).clamp(min=1)[:, None]
        self.codes = 0.9 * self.codes + 0.1 * means
        return h + (found - h).detach()


class Count(nn.Module):
    """Warms up over its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        return h * (1 - torch.exp(-self.calls))


class Seen(nn.Module):
    """Counts samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, h):
        self.samples.add_(h.shape[0])
        return h


class MovingMean(nn.Module):
    """Subtracts a moving mean over batches, then updates it."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, h):
        found = h - self.mean
        self.mean.mul_(0.9).add_(0.1 * h.detach().flatten(0, -2).mean(0))
        return found


class MovingPeak(nn.Module):
    """Divides by a moving largest activation, as quantisation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("peak", torch.ones(()))

    def forward(self, h):
        self.peak = torch.maximum(0.9 * self.peak, h.detach().abs().amax())
        return h / self.peak


def normalized_rows(z):
    return F.normalize(z.reshape(-1, z.shape[-1]), dim=-1)


def supervised_contrast(z, y):
    rows, y = normalized_rows(z), y.flatten()
    same = (y[:, None] == y).to(z.dtype) - torch.eye(len(y))
    return -(same * (rows @ rows.T / 0.5).log_softmax(-1)).sum() / same.sum().clamp(min=1)


def slopes(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)[0]


def mean_slopes(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).tanh().mean(), x, create_graph=True)[0]


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm() + 1e-6)


def lengths_mask(lengths, size):
    return (torch.arange(size)[None] < lengths[:, None]).to(torch.get_default_dtype())
