"""Toy data on several processes, as the tutorial on `DistributedDataParallel` of PyTorch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from sbp_launch import parallelize

torch.manual_seed(0)


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def loss_of(model, batch):
    source, targets = batch
    output = model(source)
    return nn.functional.mse_loss(output, targets)


class Trainer:
    def __init__(self, model, train_data, step, rank, save_every):
        self.rank = rank
        self.model = model
        self.train_data = train_data
        self.step = step
        self.save_every = save_every

    def _run_batch(self, source, targets):
        return float(self.step((source, targets)))

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses = [self._run_batch(source, targets) for source, targets in self.train_data]
        if self.rank == 0:
            print(f"Epoch {epoch} | Steps: {len(losses)} | Loss: {sum(losses):.4f}")

    def _save_checkpoint(self, epoch):
        torch.save(self.model.state_dict(), "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


dataset = MyTrainDataset(256)
model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
example, given = next(iter(DataLoader(dataset, 16))), {"planner": "manual/data_parallel"}
with parallelize(model, loss_of, example, optimizer, batch_is="local", **given) as step:
    rank, size = step.data_parallel_rank, step.data_parallel_size
    sampler = DistributedSampler(dataset, size, rank)
    train_data = DataLoader(dataset, batch_size=16, shuffle=False, sampler=sampler)
    Trainer(model, train_data, step, rank, save_every=2).train(max_epochs=4)
