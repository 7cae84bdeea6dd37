"""The protocols of plugins for models, data sets and optimizers; `sbp_launch` trains with them.

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

    A sample is a pure function of its split and number. A data set knows no epoch, no batch and no
    rank (but see `AugmentedDataset`): the trainer decides which samples a step takes, in which
    order and in which process. One thread at a time calls a data set; it need not be the thread
    that built it.
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
            split: Name of the split.

        Returns:
            Tensors in host memory, of size n along dim 0, which counts samples. Names, dtypes and
            the other dims are the same for all numbers.

        Raises:
            SbpLookupError: no such split.
            SbpError: a sample cannot be read. The error names the problem, the file and the place.
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
    """A data set that changes a sample from epoch to epoch, such as mirrored images.

    Only samples to train on are augmented; evaluation takes them as they are.
    """

    def augment(
        self,
        samples: Mapping[str, torch.Tensor],
        numbers: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
    ) -> Mapping[str, torch.Tensor]:
        """Return augmented samples: each a pure function of its number and its epoch.

        Thus a run that is resumed, or continues with other ranks, trains on the same samples.

        Args:
            samples: Samples of the first split, as `samples` returns them.
            numbers: The numbers of the samples, int64 (n,).
            epochs: The epoch of each sample, int64 (n,), from 0; a batch may span several.

        Returns:
            The same names, shapes and dtypes.
        """


class OptimizerFactory(Protocol):
    """Kind `optimizer`: `build(config)` returns a maker of `torch.optim` optimizers."""

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters."""
