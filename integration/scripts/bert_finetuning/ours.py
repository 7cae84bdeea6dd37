import torch
from parts import collate, make_model, test_set, train_set
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_linear_schedule_with_warmup

from sbp_launch import parallelize
from sbp_launch.parallel import LengthBuckets


def loss_of(model, batch):
    return model(**batch).loss


def main():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    example = collate([train_set[i] for i in range(16)])
    pad_to = LengthBuckets(sizes=(16, 24), values={"input_ids": 0, "attention_mask": 0})
    chosen = {"batch_is": "local", "update": {"clip_norm": 1.0}, "pad_to": pad_to}
    with parallelize(model, loss_of, example, optimizer, **chosen) as step:
        rank, size = step.data_parallel_rank, step.data_parallel_size
        sampler = DistributedSampler(train_set, size, rank)
        loader = DataLoader(train_set, 32 // size, sampler=sampler, collate_fn=collate)
        scheduler = get_linear_schedule_with_warmup(optimizer, 4, 3 * len(loader))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                step(batch)
                scheduler.step()
            batch = collate([test_set[i] for i in range(len(test_set))])
            loss = step.evaluate(batch, batch_is="global")
            if rank == 0:
                print(f"epoch {epoch}: held-out loss {loss:.4f}")


main()
