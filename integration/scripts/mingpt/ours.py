import math

import torch
from parts import GPT, test_set, train_set
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize


def loss_of(model, batch):
    idx, targets = batch
    return model(idx, targets)[1]


def main():
    torch.manual_seed(3407)
    raw_model = GPT()
    optimizer = raw_model.configure_optimizers(lr=3e-3, weight_decay=0.1)
    chosen = {"batch_is": "local", "update": {"clip_norm": 1.0}}
    with parallelize(raw_model, loss_of, train_set[:32], optimizer, **chosen) as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        loader = DataLoader(train_set, 64 // size, sampler=sampler)
        iteration, most = 0, 3 * len(loader)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                lr = 3e-3 * 0.5 * (1 + math.cos(math.pi * iteration / most))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                step(batch)
                iteration += 1
            loss = step.evaluate(test_set[:], batch_is="global")
            if rank == 0:
                print(f"epoch {epoch}: lr {lr:.5f}, test loss {loss:.4f}")
        step.copy_to(raw_model)
        if rank == 0:
            torch.save(raw_model.state_dict(), "model.pt")


main()
