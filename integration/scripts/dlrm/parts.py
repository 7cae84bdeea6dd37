"""Made-up clicks, and a deep learning recommendation model."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

ROWS = (200, 100, 50, 20)


class DLRM(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in ROWS)
        self.bot_l = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top_l = nn.Sequential(nn.Linear(pairs + width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense_x, sparse_x):
        x = self.bot_l(dense_x)
        ly = [
            emb(column[:, None]) for emb, column in zip(self.emb_l, sparse_x.unbind(1), strict=True)
        ]
        both = torch.stack([x, *ly], dim=1)
        products = both @ both.transpose(1, 2)
        row, column = torch.tril_indices(len(ly) + 1, len(ly) + 1, -1)
        return self.top_l(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)


def clicks(count, seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(count, 4, generator=generator)
    sparse = [torch.randint(rows, (count,), generator=generator) for rows in ROWS]
    score = dense[:, 0] - dense[:, 1] + (sparse[3] % 2) - 0.5
    return TensorDataset(dense, torch.stack(sparse, dim=1), (score > 0).float())


train_set, test_set = clicks(1024, seed=1), clicks(256, seed=2)
