"""A language model by an LSTM, as PyTorch's example `word_language_model`: time comes first."""

import math

import torch
from torch import nn

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
    return source[i : i + BPTT], source[i + 1 : i + 1 + BPTT].view(-1)


text = (torch.arange(BATCH * 58) * 7 + torch.arange(BATCH * 58) // 5) % WORDS
train_data, val_data = batchify(text[: BATCH * 41]), batchify(text[BATCH * 41 :])
model = RNNModel()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)


def init_hidden():
    return torch.zeros(1, BATCH, 24), torch.zeros(1, BATCH, 24)


def evaluate():
    model.eval()
    total, hidden = 0.0, init_hidden()
    with torch.no_grad():
        for i in range(0, len(val_data) - 1 - BPTT, BPTT):
            data, targets = get_batch(val_data, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    model.train()
    return total / (len(val_data) - 1)


best_val_loss = None
for epoch in range(3):
    hidden, total_loss = init_hidden(), 0.0
    for i in range(0, len(train_data) - 1 - BPTT, BPTT):
        data, targets = get_batch(train_data, i)
        hidden = tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total_loss += loss.item()
    val_loss = evaluate()
    print(f"epoch {epoch}: loss {total_loss:.4f}, valid {val_loss:.4f}, {math.exp(val_loss):.4f}")
    if best_val_loss is None or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
