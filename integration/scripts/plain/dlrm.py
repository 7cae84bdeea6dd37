"""Clicks of sparse and dense features, in the manner of DLRM on several processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(123)
SIZES, WIDTH, DENSE = (50, 30, 20), 8, 6


def create_mlp(*sizes):
    layers = []
    for n, m in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(size, WIDTH, mode="sum") for size in SIZES)
        self.bot_l = create_mlp(DENSE, 16, WIDTH)
        pairs = (len(SIZES) + 1) * len(SIZES) // 2
        self.top_l = create_mlp(WIDTH + pairs, 16, 1)
        self.register_buffer("pairs", torch.tril_indices(len(SIZES) + 1, len(SIZES) + 1, -1))

    def interact_features(self, x, ly):
        together = torch.stack([x, *ly], dim=1)
        products = torch.bmm(together, together.transpose(1, 2))
        return torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)

    def forward(self, dense_x, sparse_x):
        x = self.bot_l(dense_x)
        ly = [table(sparse_x[:, k]) for k, table in enumerate(self.emb_l)]
        return self.top_l(self.interact_features(x, ly)).squeeze(1)


def clicks(size):
    """Return dense features, two indices of each sparse one, and whether there was a click."""
    dense = torch.rand(size, DENSE)
    sparse = torch.stack([torch.randint(n, (size, 2)) for n in SIZES], dim=1)
    clicked = (sparse[:, 0].sum(1) % 7 < 3) ^ (dense[:, 0] > 0.7)
    return TensorDataset(dense, sparse, clicked.float())


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
train_data, test_data = clicks(512), clicks(128)
dlrm = DLRM()
wrapped = DistributedDataParallel(dlrm)
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adagrad(dlrm.parameters(), lr=0.05)
sampler = DistributedSampler(train_data, size, rank)
train_ld = DataLoader(train_data, batch_size=32, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    total_loss = 0
    for dense, sparse, target in train_ld:
        loss = loss_fn(wrapped(dense, sparse), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        total_loss += loss.item()
    with torch.no_grad():
        dense, sparse, target = test_data[:]
        test_loss = loss_fn(dlrm(dense, sparse), target)
    if rank == 0:
        print(f"epoch {epoch}: loss {total_loss / len(train_ld):.4f}, test loss {test_loss:.4f}")
dist.destroy_process_group()
