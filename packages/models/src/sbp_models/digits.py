"""The data set `digits`: 1,797 real handwritten digits of 8 x 8 pixels from scikit-learn.

Every tenth image is held out. No network is used: scikit-learn contains the images.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998 (its test set).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_models.configs import DigitsConfig
from sbp_models.extras import library
from sbp_models.splits import SplitDataset

#: One of this many images is held out.
_HELD_OUT_EVERY = 10


class Digits(SplitDataset):
    """Images of digits with labels. Implements `sbp_torch.kinds.Dataset`."""

    def __init__(self, config: DigitsConfig) -> None:
        sklearn: Any = library("sklearn.datasets", extra="digits", needed_by="data=digits")
        found = sklearn.load_digits()
        images = found.images.astype(np.float32) / 8 - 1  # 0 to 16 in the file
        zoom = config.image_size // 8
        images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
        self._images = np.repeat(images[:, None], config.channels, axis=1)
        self._labels = found.target.astype(np.int64)
        held = np.arange(len(images)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        self._rows = {"train": np.flatnonzero(~held), "validation": np.flatnonzero(held)}
        sizes = {split: len(rows) for split, rows in self._rows.items()}
        super().__init__(sizes, label="handwritten digits of scikit-learn")

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return images of `train` or `validation`.

        Returns:
            `images`, float32 (n, channels, image_size, image_size), in [-1, 1]; `labels`, int64
            (n,).
        """
        found = self._checked(numbers, split)
        rows = self._rows[split][found]
        return {
            "images": torch.from_numpy(self._images[rows]),
            "labels": torch.from_numpy(self._labels[rows]),
        }

    def describe(self) -> str:
        """Return a line with the number of images."""
        return f"{self._label}: {self._counts()}, 10 classes"
