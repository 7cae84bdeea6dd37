"""Images with a bright blob, and the two networks."""

import torch
from torch import nn


def blobs(count):
    place = 4 + 8 * torch.rand(2, count, 1)
    row, column = torch.exp(-((torch.arange(16) - place) ** 2) / 8)
    return 2 * row[:, None, :, None] * column[:, None, None, :] - 1


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.1)


def make_networks():
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    return generator.apply(weights_init), discriminator.apply(weights_init)
