"""The data set `images`: synthetic striped images; direction and colour depend on the class.

Class `c` of `C` has stripes at the angle pi c / C, with four periods across the image, in a
distinct colour. Every sample shifts them by up to a quarter of a period and adds noise. A sample is
a pure function of the seed, the split and its number. The pattern of a class is computed for the
samples that have it, so the number of classes costs no memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sbp_models.configs import ImagesConfig
from sbp_models.counter_based_random import below, key_of, members, normal, uniform
from sbp_models.splits import SplitDataset, made_up_splits

#: Periods of the stripes across an image.
PERIODS = 4


class StripedImages(SplitDataset):
    """Images and their classes. Implements `sbp_torch.kinds.Dataset`."""

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config
        super().__init__(made_up_splits(config.num_samples), label=self.describe())

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return samples of `train` or `validation`.

        Returns:
            `images`, float32 (n, channels, image_size, image_size), of mean about 0 and amplitude
            about 1; `labels`, int64 (n,).
        """
        config = self._config
        checked = self._checked(numbers, split)
        samples = checked.astype(np.uint64)
        labels = below(key_of(config.seed, split, "label"), samples, config.num_classes)
        shifts = np.pi / 2 * uniform(key_of(config.seed, split, "shift"), samples)
        stripes = np.sin(self._phases(labels) + shifts[:, None, None])
        images = self._colours(labels)[:, :, None, None] * stripes[:, None]
        noise = normal(key_of(config.seed, split, "noise"), members(samples, images[0].size))
        images += config.noise * noise.reshape(images.shape)
        return {"images": _float32(images), "labels": torch.from_numpy(labels)}

    def _phases(self, classes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the phase of the stripes of each class at each pixel: (n, height, width)."""
        config = self._config
        angles = np.pi * classes / config.num_classes
        across = 2 * np.pi * PERIODS * np.arange(config.image_size) / config.image_size
        phases: npt.NDArray[np.float64] = (
            np.sin(angles)[:, None, None] * across[:, None] + np.cos(angles)[:, None, None] * across
        )
        return phases

    def _colours(self, classes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the amplitude of each channel of each class, in [-1, 1]: (n, channels)."""
        counts = members(classes.astype(np.uint64), self._config.channels)
        return 2 * uniform(key_of(self._config.seed, "colours"), counts) - 1

    def describe(self) -> str:
        """Return a line with the number of classes and the size of the images."""
        config = self._config
        return (
            f"striped images of {config.num_classes} classes, "
            f"{config.channels} x {config.image_size} x {config.image_size}"
        )


def _float32(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def build(config: ImagesConfig) -> StripedImages:
    """Build the data set."""
    return StripedImages(config)
