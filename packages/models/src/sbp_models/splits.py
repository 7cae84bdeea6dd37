"""Base class of data sets with splits: the size of each split, and a check of sample numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sbp_core.errors import ConfigError, SbpValueError, unknown_name

#: Training samples for each sample that is held out, in synthetic data sets.
TRAIN_PER_HELD_OUT = 20


def made_up_splits(num_samples: int) -> dict[str, int]:
    """Return the size of each split of a synthetic data set with `num_samples` to train on."""
    return {"train": num_samples, "validation": -(-num_samples // TRAIN_PER_HELD_OUT)}


class SplitDataset:
    """Base class of data sets with splits of known sizes.

    Args:
        sizes: Number of samples of each split.
        label: Name of the data set in messages.
        accepted: Requirement, for the error about an empty split.

    Raises:
        ConfigError: a split has no samples.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, label: str, accepted: str = "more samples"
    ) -> None:
        self._sizes, self._label = dict(sizes), label
        for split, size in sizes.items():
            if not size:
                raise ConfigError(
                    f"{label}: {sum(sizes.values())} samples, and none for the split {split!r}",
                    accepted=accepted,
                )

    def num_samples(self, split: str = "train") -> int:
        """Return the number of samples of a split.

        Raises:
            SbpLookupError: no such split.
        """
        if split not in self._sizes:
            raise unknown_name("split", split, self._sizes, where=self._label)
        return self._sizes[split]

    def _checked(self, numbers: npt.ArrayLike, split: str) -> npt.NDArray[np.int64]:
        """Return the numbers of samples of a split as an array: int64 (n,).

        Raises:
            SbpLookupError: no such split.
            SbpValueError: a number is out of range.
        """
        size = self.num_samples(split)
        found = np.asarray(numbers, dtype=np.int64).reshape(-1)
        outside = (found < 0) | (found >= size)
        if outside.any():
            raise SbpValueError(
                f"split {split!r} has no sample {found[outside][0]}",
                where=self._label,
                accepted=f"numbers in 0 to {size - 1}",
            )
        return found

    def _counts(self) -> str:
        """Return a text with the number of samples of each split."""
        return ", ".join(f"{size:,} {split}" for split, size in self._sizes.items())
