"""A text of 20 words that repeats itself, and an LSTM that reads it part by part."""

import torch
from torch import nn

BATCH, PART = 8, 10


class RNNModel(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.encoder = nn.Embedding(20, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.decoder = nn.Linear(16, 20)
        self.register_buffer("h", torch.zeros(1, columns, 16), persistent=False)
        self.register_buffer("c", torch.zeros(1, columns, 16), persistent=False)

    def forward(self, words):
        output, (h, c) = self.rnn(self.encoder(words), (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.decoder(output)

    def init_hidden(self):
        self.h, self.c = torch.zeros_like(self.h), torch.zeros_like(self.c)


def batchify(count, seed):
    start = torch.randint(20, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return (start + torch.arange(count) ** 2) % 20


def parts(text):
    for i in range(0, text.shape[1] - 1, PART):
        yield text[:, i : i + PART], text[:, i + 1 : i + 1 + PART]


train_text, valid_text = batchify(101, seed=1), batchify(51, seed=2)
