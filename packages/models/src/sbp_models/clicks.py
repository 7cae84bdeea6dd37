"""The data set `clicks`: synthetic clicks with numbers and categorical features.

Values of a feature are drawn with a density proportional to 1 / rank, as in real logs. The
probability of a click follows from a fixed rule, so a model can learn it: every number has a
weight, every value of a feature an effect. A sample is a pure function of the seed, the split and
its number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sbp_models.configs import ClicksConfig
from sbp_models.counter_based_random import key_of, members, normal, uniform
from sbp_models.splits import SplitDataset, made_up_splits

#: Standard deviation of the logit of a click.
LOGIT_STD = 2.0


class Clicks(SplitDataset):
    """Synthetic samples with labels. Implements `sbp_torch.kinds.Dataset`."""

    def __init__(self, config: ClicksConfig) -> None:
        self._config = config
        super().__init__(made_up_splits(config.num_samples), label=self.describe())
        rule = key_of(config.seed, "rule")
        self._weights = normal(rule, np.arange(config.num_dense, dtype=np.uint64))

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return samples of `train` or `validation`.

        Returns:
            `dense`, float32 (n, num_dense), of mean 0 and variance 1; `sparse`, int64 (n, features,
            bag), rows of the tables; `clicks`, float32 (n,), 0 or 1.
        """
        config = self._config
        checked = self._checked(numbers, split)
        samples = checked.astype(np.uint64)
        dense = normal(key_of(config.seed, split, "dense"), members(samples, config.num_dense))
        picks = [
            self._pick(key_of(config.seed, split, "feature", feature), samples, rows)
            for feature, rows in enumerate(config.rows)
        ]
        chance = 1 / (1 + np.exp(-self._logits(dense, picks)))
        clicks = uniform(key_of(config.seed, split, "click"), samples) < chance
        return {
            "dense": torch.from_numpy(dense.astype(np.float32)),
            "sparse": torch.from_numpy(np.stack(picks, axis=1)),
            "clicks": torch.from_numpy(clicks.astype(np.float32)),
        }

    def describe(self) -> str:
        """Return a line with the numbers of dense values and features."""
        config = self._config
        return (
            f"synthetic clicks, {config.num_dense} numbers, {len(config.rows)} features of "
            f"{sum(config.rows)} values in all"
        )

    def _pick(self, key: int, samples: npt.NDArray[np.uint64], rows: int) -> npt.NDArray[np.int64]:
        """Return values of a feature, int64 (batch, bag); low values are the most frequent."""
        # The integer part of (rows + 1) ** u has the density 1 / value.
        drawn = (rows + 1.0) ** uniform(key, members(samples, self._config.bag))
        return np.minimum(drawn.astype(np.int64) - 1, rows - 1)

    def _logits(
        self, dense: npt.NDArray[np.float64], picks: list[npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.float64]:
        """Return the logit of a click: float64 (batch,), of variance about `LOGIT_STD` ** 2."""
        total = dense @ self._weights
        for feature, values in enumerate(picks):
            effects = normal(key_of(self._config.seed, "effect", feature), values.astype(np.uint64))
            total = total + effects.sum(axis=1)
        scale: float = LOGIT_STD / np.sqrt(dense.shape[1] + len(picks) * self._config.bag)
        return scale * total
