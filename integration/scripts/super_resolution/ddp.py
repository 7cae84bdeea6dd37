from math import log10

import torch
import torch.distributed as dist
from parts import Net, test_set, train_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(123)
    model = DistributedDataParallel(Net(upscale_factor=2))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(train_set, size, rank)
    train_loader = DataLoader(train_set, batch_size=16 // size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32)
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            epoch_loss += loss.item() / len(train_loader)
            loss.backward()
            optimizer.step()
        dist.all_reduce(epoch_loss)
        epoch_loss /= size
        avg_psnr = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                mse = criterion(model(data), target)
                avg_psnr += 10 * log10(1 / mse.item()) / len(test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {epoch_loss:.4f}, PSNR {avg_psnr:.2f} dB")
    if rank == 0:
        torch.save(model.module, "super_resolution.pt")
    dist.destroy_process_group()


main()
