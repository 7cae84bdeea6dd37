"""A data set in one idea: sequences that count up at different rates.

It returns samples by number. The trainer decides on epochs, order, batches and loading.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import unknown_name
from sbp_example_plugin.plugin import DataConfig


class Counting:
    """Sample `i` begins with `i` and counts up in steps of 1, 2, 3, ..."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._sizes = {"train": config.num_samples, "validation": -(-config.num_samples // 10)}

    def num_samples(self, split: str = "train") -> int:
        """Return the number of samples of a split."""
        if split not in self._sizes:
            raise unknown_name("split", split, self._sizes)
        return self._sizes[split]

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return `tokens` and `targets`, int64 (n, context) each: a pure function of `numbers`."""
        first = numbers + (self.num_samples("train") if split == "validation" else 0)
        self.num_samples(split)  # refuses an unknown split
        stride = 1 + first // self._config.vocabulary
        counts = first[:, None] + stride[:, None] * np.arange(self._config.context + 1)
        tokens = torch.from_numpy(counts % self._config.vocabulary)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def describe(self) -> str:
        """Return a description in one line."""
        return f"sequences that count up, {self._config.num_samples:,} to train on"


def build(config: DataConfig) -> Counting:
    """Make the data set."""
    return Counting(config)
