"""The splits of a data set: how many samples each has, and whether what is asked for is in them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sbp_core.errors import SbpValueError, unknown_name

#: Samples of the train split for each one that is held out, of data sets that are made up.
TRAIN_PER_HELD_OUT = 20


def made_up_splits(num_samples: int) -> dict[str, int]:
    """Return the samples of each split of a made-up data set, which has so many to train on."""
    return {"train": num_samples, "validation": -(-num_samples // TRAIN_PER_HELD_OUT)}


def size_of(splits: Mapping[str, int], split: str, *, where: str) -> int:
    """Return how many samples a split has.

    Args:
        splits: The samples of each split.
        split: Its name.
        where: What the data set is called.

    Raises:
        SbpLookupError: no such split.
    """
    if split not in splits:
        raise unknown_name("split", split, splits, where=where)
    return splits[split]


def checked_numbers(
    numbers: npt.ArrayLike, splits: Mapping[str, int], split: str, *, where: str
) -> npt.NDArray[np.int64]:
    """Return the numbers of samples of a split as an array: int64 (n,).

    Raises:
        SbpLookupError: no such split.
        SbpValueError: it has no sample of one of the numbers.
    """
    size = size_of(splits, split, where=where)
    found = np.asarray(numbers, dtype=np.int64).reshape(-1)
    outside = (found < 0) | (found >= size)
    if outside.any():
        raise SbpValueError(
            f"split {split!r} has no sample {found[outside][0]}",
            where=where,
            accepted=f"numbers in 0 to {size - 1}",
        )
    return found
