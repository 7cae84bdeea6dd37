"""A model in one idea: predict each token from the one before, through a layer of low rank."""

from collections.abc import Mapping

import torch
from torch import nn

from sbp_example_plugin.operator import low_rank
from sbp_example_plugin.plugin import ModelConfig


class Bigram(nn.Module):
    """An ordinary `nn.Module` with a `loss`; `logits` and `context` let it also generate text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        scale = config.hidden**-0.5
        self.down = nn.Parameter(torch.randn(config.hidden, config.rank) * scale)
        self.up = nn.Parameter(torch.randn(config.rank, config.hidden) * scale)
        self.head = nn.Linear(config.hidden, config.vocabulary)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, vocabulary)."""
        hidden = low_rank(self.embed(tokens.flatten()), self.down, self.up)
        logits: torch.Tensor = self.head(torch.relu(hidden))
        return logits.reshape(*tokens.shape, -1)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of `tokens` against `targets`, int64 (batch, time) each."""
        logits = self.logits(batch["tokens"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def build(config: ModelConfig) -> Bigram:
    """Make the model; the trainer has already seeded torch."""
    return Bigram(config)
