"""The task of sorting digits, and a small GPT."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

LENGTH, DIGITS = 6, 3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width=48, heads=3, layers=2):
        super().__init__()
        self.wte = nn.Embedding(DIGITS, width)
        self.wpe = nn.Embedding(2 * LENGTH - 1, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, DIGITS, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, lr, weight_decay):
        decay = [one for one in self.parameters() if one.dim() > 1]
        others = [one for one in self.parameters() if one.dim() <= 1]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def sorting(count, seed):
    given = torch.randint(DIGITS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    whole = torch.cat([given, given.sort(1).values], dim=1)
    targets = whole[:, 1:].clone()
    targets[:, : LENGTH - 1] = -1
    return TensorDataset(whole[:, :-1], targets)


train_set, test_set = sorting(512, seed=1), sorting(128, seed=2)
