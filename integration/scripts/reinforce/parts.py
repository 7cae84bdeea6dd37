"""A walk on a line that ends at either side, and a policy."""

import torch
from torch import nn

MOST = 32


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 32)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return torch.log_softmax(self.affine2(torch.relu(self.affine1(x))), dim=-1)


class Walk:
    """A walk that starts near 0 with random pushes, and should stay within 3."""

    def reset(self):
        self.place, self.speed = torch.rand(()) - 0.5, torch.zeros(())
        return torch.stack([self.place, self.speed])

    def step(self, action):
        self.speed = 0.8 * self.speed + (0.5 if action else -0.5) + 0.2 * torch.randn(())
        self.place = self.place + self.speed
        return torch.stack([self.place, self.speed]), 1.0, self.place.abs().item() > 3


def returns_of(rewards, gamma=0.95):
    found, value = [], 0.0
    for reward in reversed(rewards):
        value = reward + gamma * value
        found.insert(0, value)
    found = torch.tensor(found)
    return (found - found.mean()) / (found.std(correction=0) + 1e-6)
