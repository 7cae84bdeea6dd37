"""Sentences of numbers, whose translations are the reversed sentences; a transformer."""

import torch
from torch import nn

PAD, BOS, EOS, WORDS = 0, 1, 2, 16


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.places = nn.Embedding(16, 32)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(32, WORDS)

    def embed(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, src, tgt, tgt_mask, src_padding_mask, tgt_padding_mask):
        outs = self.transformer(
            self.embed(src),
            self.embed(tgt),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(outs)


def create_mask(src, tgt):
    size = tgt.shape[1]
    tgt_mask = torch.ones(size, size, device=tgt.device).triu(1).bool()
    return tgt_mask, src == PAD, tgt == PAD


def sentences(count, longest=8):
    lengths = torch.randint(3, longest + 1, (count,))
    lengths[0] = longest
    src = torch.full((count, longest), PAD)
    tgt = torch.full((count, longest + 2), PAD)
    for i, length in enumerate(lengths.tolist()):
        src[i, :length] = torch.randint(3, WORDS, (length,))
        tgt[i, : length + 2] = torch.tensor([BOS, *src[i, :length].flip(0).tolist(), EOS])
    return src, tgt
