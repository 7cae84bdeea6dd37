"""The model of the tutorial, and made-up data."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


torch.manual_seed(7)
data_set = TensorDataset(torch.randn(160, 10), torch.randn(160, 5))
