import torch
from parts import DLRM, test_set, train_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss_fn(dlrm, batch):
    X, lS_i, T = batch
    Z = dlrm(X, lS_i)
    accuracy = ((Z > 0) == (T > 0.5)).float().mean()
    return nn.BCEWithLogitsLoss()(Z, T), {"accuracy": accuracy}


def main():
    torch.manual_seed(123)
    dlrm = DLRM()
    optimizer = torch.optim.Adagrad(dlrm.parameters(), lr=0.05)
    with parallelize(dlrm, loss_fn, train_set[:32], optimizer, batch_is="local") as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        train_ld = DataLoader(train_set, 64 // size, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in train_ld:
                step(batch)
            E = step.evaluate(test_set[:], batch_is="global")
            accuracy = E.metrics["accuracy"]
            if rank == 0:
                print(f"epoch {epoch}: test loss {E:.4f}, accuracy {accuracy:.3f}")


main()
