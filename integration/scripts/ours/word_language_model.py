"""A language model by an LSTM, as PyTorch's example `word_language_model`: time comes first."""

import math

import torch
from torch import nn

from sbp_launch import parallelize

BPTT, BATCH, WORDS = 8, 6, 40
torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, 24)
        self.rnn = nn.LSTM(24, 24, 1)
        self.decoder = nn.Linear(24, WORDS)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).view(-1, WORDS), hidden


def batchify(ids):
    """Return the text as columns, one below each other: [time, samples]."""
    steps = ids.numel() // BATCH
    return ids[: steps * BATCH].view(BATCH, steps).t().contiguous()


def get_batch(source, i):
    return source[i : i + BPTT].t(), source[i + 1 : i + 1 + BPTT].t()


text = (torch.arange(BATCH * 58) * 7 + torch.arange(BATCH * 58) // 5) % WORDS
train_data, val_data = batchify(text[: BATCH * 41]), batchify(text[BATCH * 41 :])
model = RNNModel()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)


def loss_of(model, batch):
    data, targets, hidden = batch
    hidden = tuple(h.transpose(0, 1).contiguous() for h in hidden)
    output, (h, c) = model(data.t(), hidden)
    loss = criterion(output, targets.t().reshape(-1))
    return loss, {"h": h.detach().transpose(0, 1), "c": c.detach().transpose(0, 1)}


def init_hidden():
    return torch.zeros(BATCH, 1, 24), torch.zeros(BATCH, 1, 24)


def evaluate():
    total, hidden = 0.0, init_hidden()
    for i in range(0, len(val_data) - 1 - BPTT, BPTT):
        data, targets = get_batch(val_data, i)
        loss = step.evaluate((data, targets, hidden))
        hidden = loss.metrics["h"], loss.metrics["c"]
        total += BPTT * float(loss)
    return total / (len(val_data) - 1)


example = (*get_batch(train_data, 0), init_hidden())
given = {"mesh": 2, "planner": "manual/data_parallel", "clip_norm": 0.25}
step = parallelize(model, loss_of, example, optimizer, **given).start()
best_val_loss = None
for epoch in range(3):
    hidden, total_loss = init_hidden(), 0.0
    for i in range(0, len(train_data) - 1 - BPTT, BPTT):
        data, targets = get_batch(train_data, i)
        loss = step((data, targets, hidden))
        hidden = loss.metrics["h"], loss.metrics["c"]
        total_loss += float(loss)
    val_loss = evaluate()
    print(f"epoch {epoch}: loss {total_loss:.4f}, valid {val_loss:.4f}, {math.exp(val_loss):.4f}")
    if best_val_loss is None or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
step.close()
