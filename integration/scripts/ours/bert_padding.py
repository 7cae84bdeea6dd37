"""A BERT-like encoder that is fine-tuned on sentences, each batch padded to its longest."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from sbp_launch import parallelize
from sbp_launch.parallelize import LengthBuckets

torch.manual_seed(42)
WORDS, WIDTH, LONGEST, PAD = 40, 16, 16, 0


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.size(1)))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.classifier(x[:, 0])


def sentences(size):
    """Return sentences of 4 to 16 words, labelled by which of two words comes more often."""
    lengths = torch.randint(4, LONGEST + 1, (size,)).tolist()
    texts = [torch.randint(1, WORDS, (length,)) for length in lengths]
    return [(ids, int((ids % 2).sum() * 2 > len(ids))) for ids in texts]


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([one for one, _ in samples], True, PAD)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


train_data = sentences(128)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def loss_of(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(logits, batch["labels"])


pad_to = LengthBuckets(sizes=(12, LONGEST), values={"input_ids": PAD, "attention_mask": 0})
given = {"planner": "manual/data_parallel", "batch_is": "local", "clip_norm": 1.0}
example = collate(train_data[:16])
with parallelize(model, loss_of, example, optimizer, pad_to=pad_to, **given) as step:
    rank, size = step.data_parallel_rank, step.data_parallel_size
    sampler = DistributedSampler(train_data, size, rank)
    loader = DataLoader(train_data, batch_size=16, sampler=sampler, collate_fn=collate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4 * len(loader))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in loader:
            total += float(step(batch))
            schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
