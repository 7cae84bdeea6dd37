from math import log10

import torch
from parts import Net, test_set, train_set
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss(model, batch):
    data, target = batch
    return nn.MSELoss()(model(data), target)


def main():
    torch.manual_seed(123)
    model = Net(upscale_factor=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with parallelize(model, loss, train_set[:8], optimizer, batch_is="local") as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        train_loader = DataLoader(train_set, batch_size=16 // size, sampler=sampler)
        test_loader = DataLoader(test_set, batch_size=32)
        for epoch in range(1, 4):
            sampler.set_epoch(epoch)
            epoch_loss = 0.0
            for batch in train_loader:
                epoch_loss += step(batch) / len(train_loader)
            avg_psnr = 0.0
            for batch in test_loader:
                mse = step.evaluate(batch, batch_is="global")
                avg_psnr += 10 * log10(1 / mse) / len(test_loader)
            if rank == 0:
                print(f"epoch {epoch}: loss {epoch_loss:.4f}, PSNR {avg_psnr:.2f} dB")
        step.copy_to(model)
    if rank == 0:
        torch.save(model, "super_resolution.pt")


main()
