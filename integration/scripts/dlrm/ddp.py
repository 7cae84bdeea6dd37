import torch
import torch.distributed as dist
from parts import DLRM, test_set, train_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(123)
    dlrm = DistributedDataParallel(DLRM())
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adagrad(dlrm.parameters(), lr=0.05)
    sampler = DistributedSampler(train_set, size, rank)
    train_ld = DataLoader(train_set, 64 // size, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for X, lS_i, T in train_ld:
            optimizer.zero_grad()
            Z = dlrm(X, lS_i)
            E = loss_fn(Z, T)
            E.backward()
            optimizer.step()
        with torch.no_grad():
            X, lS_i, T = test_set[:]
            Z = dlrm(X, lS_i)
            E = loss_fn(Z, T)
            accuracy = ((Z > 0) == (T > 0.5)).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: test loss {E:.4f}, accuracy {accuracy:.3f}")
    dist.destroy_process_group()


main()
