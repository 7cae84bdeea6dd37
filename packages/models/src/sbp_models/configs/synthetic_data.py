"""Settings of the synthetic data sets: clicks and images."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_models.configs.checks import (
    check_not_negative,
    check_positive,
    check_seed,
    check_sizes,
)

#: Default sizes of the tables: a few large ones and many small ones, as in practice.
ROWS = (4000, 2000, 1000, 500, 100, 50, 10, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClicksConfig:
    """Settings of the data set `clicks`.

    Args:
        num_dense: Count of dense numbers in a sample.
        rows: Number of values of each categorical feature.
        bag: Number of values of each categorical feature in a sample.
        num_samples: Samples to train on; a twentieth as many are held out.
        seed: Seed of the samples and of the rule for the labels.

    Raises:
        ConfigError: a size is not positive, there is no feature, or `seed` is negative.
    """

    num_dense: int = 13
    rows: tuple[int, ...] = ROWS
    bag: int = 1
    num_samples: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "num_dense", "bag", "num_samples")
        check_sizes("rows", self.rows)
        check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """Settings of the data set `images`.

    Args:
        image_size: Height and width, in pixels.
        channels: Channels of an image.
        num_classes: Number of classes.
        noise: Standard deviation of the noise; the pattern has an amplitude of 1.
        num_samples: Samples to train on; a twentieth as many are held out.
        seed: Seed of the samples.

    Raises:
        ConfigError: a size is not positive, or `noise` or `seed` is negative.
    """

    image_size: int = 32
    channels: int = 3
    num_classes: int = 10
    noise: float = 0.5
    num_samples: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "image_size", "channels", "num_classes", "num_samples")
        check_not_negative(self, "noise")
        check_seed(self.seed)
