import torch
from parts import ToyModel, data_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss_fn(model, batch):
    inputs, labels = batch
    return nn.MSELoss()(model(inputs), labels)


def demo_checkpoint():
    torch.manual_seed(0)
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with parallelize(model, loss_fn, data_set[:20], optimizer, batch_is="local") as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        loader = DataLoader(data_set, 40 // size, sampler=DistributedSampler(data_set, size, rank))
        step.save("checkpoint")
        step.load("checkpoint")
        for epoch in range(3):
            for batch in loader:
                loss = step(batch)
                if rank == 0:
                    print(f"epoch {epoch}: loss {loss:.4f}")


demo_checkpoint()
