"""Made-up sentences of several lengths, and a small BERT."""

import torch
from transformers import BertConfig, BertForSequenceClassification

CONFIG = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 25, (count,), generator=generator).tolist()
        self.ids = [torch.randint(1, 40, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], int((self.ids[index] < 20).sum() > (self.ids[index] >= 20).sum())


def collate(samples):
    ids, labels = zip(*samples, strict=True)
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(labels)}


def make_model():
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG)


train_set, test_set = Sentences(256, seed=1), Sentences(64, seed=2)
