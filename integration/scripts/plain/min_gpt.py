"""A small GPT that learns to sort, in the manner of minGPT and its trainer on several processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(3407)
LENGTH, VOCAB, WIDTH, HEADS = 5, 4, 24, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, HEADS, c // HEADS).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH - 1, WIDTH)
        self.h = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() == 2]
        no_decay = [p for p in self.parameters() if p.dim() != 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


def sort_dataset(size):
    """Return digits, then the same sorted; only what is sorted is to be told."""
    digits = torch.randint(VOCAB, (size, LENGTH))
    whole = torch.cat([digits, digits.sort(1).values], 1)
    targets = whole[:, 1:].clone()
    targets[:, : LENGTH - 1] = -1
    return TensorDataset(whole[:, :-1], targets)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
train_dataset = sort_dataset(256)
model = GPT()
optimizer = model.configure_optimizers()
wrapped = DistributedDataParallel(model)
sampler = DistributedSampler(train_dataset, size, rank, seed=1)
loader = DataLoader(train_dataset, batch_size=16, sampler=sampler, drop_last=True)
iter_num = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = wrapped(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        if rank == 0 and iter_num % 4 == 0:
            print(f"iter {iter_num}: train loss {loss.item():.4f}")
        iter_num += 1
dist.destroy_process_group()
