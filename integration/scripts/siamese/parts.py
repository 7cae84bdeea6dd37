"""Made-up pairs of images of 8 x 8, and a network that predicts whether they are alike."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 16)
        )
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, one, other):
        both = torch.cat([self.body(one), self.body(other)], dim=1)
        return torch.sigmoid(self.fc(both))


def pairs(count, seed):
    shapes = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (2, count), generator=generator)
    labels[1, ::2] = labels[0, ::2]
    images = shapes[labels] + 0.5 * torch.randn(2, count, 1, 8, 8, generator=generator)
    return TensorDataset(*images, (labels[0] == labels[1]).float())


train_set, test_set = pairs(512, seed=1), pairs(256, seed=2)
