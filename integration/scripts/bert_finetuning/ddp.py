import torch
import torch.distributed as dist
from parts import collate, make_model, test_set, train_set
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_linear_schedule_with_warmup


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(train_set, size, rank)
    loader = DataLoader(train_set, 32 // size, sampler=sampler, collate_fn=collate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, 3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            batch = collate([test_set[i] for i in range(len(test_set))])
            loss = model(**batch).loss
        if rank == 0:
            print(f"epoch {epoch}: held-out loss {loss:.4f}")
    dist.destroy_process_group()


main()
