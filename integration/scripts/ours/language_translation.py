"""A transformer that translates, as PyTorch's example `language_translation`: time comes first."""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from sbp_launch import parallelize

torch.manual_seed(0)
PAD, BOS, EOS, WORDS, LONGEST = 0, 1, 2, 24, 10


class Translator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.generator = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.0)
        angles = torch.arange(LONGEST)[:, None] * torch.exp(
            -torch.arange(0, width, 2) * math.log(10000) / width
        )
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1)[:, None])

    def embed(self, tokens):
        return self.embedding(tokens) * 4 + self.places[: tokens.size(0)]

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask):
        outs = self.transformer(
            self.embed(src), self.embed(trg), src_mask, tgt_mask, None,
            src_padding_mask, tgt_padding_mask, src_padding_mask,
        )  # fmt: skip
        return self.generator(outs)


def create_mask(src, tgt):
    tgt_mask = torch.triu(torch.ones(len(tgt), len(tgt), dtype=torch.bool), diagonal=1)
    src_mask = torch.zeros((len(src), len(src)), dtype=torch.bool)
    return src_mask, tgt_mask, (src == PAD).transpose(0, 1), (tgt == PAD).transpose(0, 1)


def make_pairs(size):
    """Return sentences, and the same backwards in words of another language."""
    lengths = torch.randint(3, LONGEST - 2, (size,)).tolist()
    sentences = [torch.randint(3, WORDS, (length,)) for length in lengths]
    return [(words, (words.flip(0) * 5) % 21 + 3) for words in sentences]


def collate_fn(batch):
    """Return [time, samples] of both languages, padded to the longest of all."""
    whole = torch.full((LONGEST,), PAD)
    src, tgt = ([nn.functional.pad(w, (1, 0), value=BOS) for w in side] for side in zip(*batch))
    src, tgt = ([nn.functional.pad(w, (0, 1), value=EOS) for w in side] for side in (src, tgt))
    return tuple(pad_sequence([*side, whole], padding_value=PAD)[:, :-1] for side in (src, tgt))


transformer = Translator()
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.005, betas=(0.9, 0.98), eps=1e-6)
train_dataloader = DataLoader(make_pairs(64), batch_size=16, collate_fn=collate_fn)
val_dataloader = DataLoader(make_pairs(32), batch_size=16, collate_fn=collate_fn)


def loss_of(transformer, batch):
    src, tgt = (side.transpose(0, 1) for side in batch)
    tgt_input, tgt_out = tgt[:-1], tgt[1:]
    logits = transformer(src, tgt_input, *create_mask(src, tgt_input))
    return loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))


example = [side.t() for side in next(iter(train_dataloader))]
given = {"mesh": 2, "planner": "manual/data_parallel"}
step = parallelize(transformer, loss_of, example, optimizer, **given).start()


def train_epoch():
    losses = 0
    for src, tgt in train_dataloader:
        losses += float(step([src.t(), tgt.t()]))
    return losses / len(train_dataloader)


def evaluate():
    losses = 0
    for src, tgt in val_dataloader:
        losses += float(step.evaluate([src.t(), tgt.t()]))
    return losses / len(val_dataloader)


for epoch in range(1, 4):
    print(f"epoch {epoch}: train loss {train_epoch():.4f}, val loss {evaluate():.4f}")
