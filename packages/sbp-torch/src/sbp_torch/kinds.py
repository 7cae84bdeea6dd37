"""The contracts of plugins that use PyTorch: models, data sets and optimizers.

The other kinds are in `sbp_core.plugins.kinds`. This module imports torch for types only, so that
listing plugins and refusing a config do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "AugmentedDataset",
    "Dataset",
    "LanguageModel",
    "OptimizerFactory",
    "TextDataset",
    "TrainableModel",
]


class TrainableModel(Protocol):
    """Kind `model`: `build(config)` returns an `nn.Module` that also has `loss`.

    The trainer seeds torch before it calls `build`, so initialisation is repeatable.
    """

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch: a 0-d floating tensor."""


@runtime_checkable
class LanguageModel(Protocol):
    """A model that can also continue a text."""

    context: int

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time <= context) to logits (batch, time, vocabulary)."""


class Dataset(Protocol):
    """Kind `data`: `build(config)` returns samples by their numbers, in any order.

    A sample is a pure function of its split and number. Which samples a step takes, in which order,
    and which process asks for which of them is not decided here, so a data set knows no epoch, no
    batch and no rank (but see `AugmentedDataset`). It is asked by one thread at a time, which need
    not be the one that made it.
    """

    def num_samples(self, split: str = "train") -> int:
        """Return how many samples a split has, >= 1; always the same.

        Raises:
            SbpLookupError: no such split.
        """

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return some samples of a split, in the order asked for, as tensors by name.

        Args:
            numbers: int64 (n,), n >= 1, each in [0, num_samples(split)); may repeat.
            split: Of which they are.

        Returns:
            Tensors in host memory whose dim 0 is the sample: n of `numbers`. Names, dtypes and the
            other dims are the same whatever the numbers.

        Raises:
            SbpLookupError: no such split.
            SbpError: a sample cannot be read: what is wrong with it, and in which file, where.
        """

    def describe(self) -> str:
        """Return one line: what the data is and how large."""


@runtime_checkable
class TextDataset(Dataset, Protocol):
    """A data set of text, which can turn tokens to text and back."""

    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""


@runtime_checkable
class AugmentedDataset(Dataset, Protocol):
    """A data set that makes something else of a sample in each epoch, such as mirrored images.

    Only samples to train on are augmented; evaluation takes them as they are.
    """

    def augment(
        self,
        samples: Mapping[str, torch.Tensor],
        numbers: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
    ) -> Mapping[str, torch.Tensor]:
        """Return samples as the run takes them: each a pure function of its number and its epoch.

        So a run that was stopped, or goes on with other ranks, takes what it would have taken.

        Args:
            samples: Of the first split, as `samples` returns them.
            numbers: Their numbers, int64 (n,).
            epochs: The epoch of each, int64 (n,), from 0; a batch may have several.

        Returns:
            The same names, shapes and dtypes.
        """


class OptimizerFactory(Protocol):
    """Kind `optimizer`: `build(config)` returns a maker of `torch.optim` optimizers."""

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters."""
