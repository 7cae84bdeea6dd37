import math

import torch
import torch.distributed as dist
from parts import GPT, test_set, train_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3407)
    raw_model = GPT()
    model = DistributedDataParallel(raw_model)
    optimizer = raw_model.configure_optimizers(lr=3e-3, weight_decay=0.1)
    sampler = DistributedSampler(train_set, size, rank)
    loader = DataLoader(train_set, 64 // size, sampler=sampler)
    iteration, most = 0, 3 * len(loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for idx, targets in loader:
            lr = 3e-3 * 0.5 * (1 + math.cos(math.pi * iteration / most))
            for group in optimizer.param_groups:
                group["lr"] = lr
            _, loss = model(idx, targets)
            model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            iteration += 1
        model.eval()
        with torch.no_grad():
            _, loss = model(*test_set[:])
        if rank == 0:
            print(f"epoch {epoch}: lr {lr:.5f}, test loss {loss:.4f}")
    if rank == 0:
        torch.save(raw_model.state_dict(), "model.pt")
    dist.destroy_process_group()


main()
