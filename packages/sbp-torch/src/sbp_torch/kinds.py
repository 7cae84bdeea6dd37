"""What a plugin supplies whose kind speaks PyTorch: models, data sets and optimizers.

The other kinds are in `sbp_core.plugins.kinds`. This module imports torch for types only, so that
listing plugins and refusing a config do not wait for it.

Stability: stable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Dataset", "LanguageModel", "OptimizerFactory", "TextDataset", "TrainableModel"]


class TrainableModel(Protocol):
    """Kind `model`: `build(config)` returns an `nn.Module` that also has `loss`.

    The trainer seeds torch before it calls `build`, so initialisation is repeatable.
    """

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch: a 0-d floating tensor."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A model that can also continue a text."""

    context: int

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time <= context) to logits (batch, time, vocabulary)."""
        ...


class Dataset(Protocol):
    """Kind `data`: `build(config)` returns batches as a pure function of their index.

    So the position in the data is one integer, and any rank can make any batch.
    """

    def batch(
        self, index: int, batch_size: int, split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return the batch of that index: tensors whose dim 0 is the sample, by name."""
        ...

    def describe(self) -> str:
        """Return one line: what the data is and how large."""
        ...


@runtime_checkable
class TextDataset(Dataset, Protocol):
    """A data set of text, which can turn tokens to text and back."""

    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        ...


class OptimizerFactory(Protocol):
    """Kind `optimizer`: `build(config)` returns a maker of `torch.optim` optimizers."""

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters."""
        ...
