"""Made-up images of 8 x 8, and an auto-encoder that gets its noise as an argument."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 5)
        self.fc22 = nn.Linear(40, 5)
        self.fc3 = nn.Linear(5, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, noise):
        mu, logvar = self.encode(x)
        return self.decode(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (bce + kld) / len(x)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(64, (count, 1), generator=generator)
    return (-((torch.arange(64) - place) ** 2) / 40).exp()


train_set, test_set = images(512, seed=1), images(128, seed=2)
