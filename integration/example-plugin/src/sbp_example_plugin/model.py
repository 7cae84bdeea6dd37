"""A model in one idea: predict each token from the one before, through one hidden layer."""

from collections.abc import Mapping

import torch
from torch import nn

from sbp_example_plugin.plugin import ModelConfig


class Bigram(nn.Module):
    """An ordinary `nn.Module` with a `loss`; with `logits` and `context` it can write text too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.hidden = nn.Linear(config.hidden, config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, vocabulary)."""
        logits: torch.Tensor = self.head(torch.relu(self.hidden(self.embed(tokens))))
        return logits

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of `tokens` against `targets`, int64 (batch, time) each."""
        logits = self.logits(batch["tokens"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def build(config: ModelConfig) -> Bigram:
    """Make the model; the trainer has seeded torch before."""
    return Bigram(config)
