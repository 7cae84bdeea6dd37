import numpy as np
import pytest

from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_models.splits import checked_numbers, made_up_splits, size_of


def test_a_twentieth_is_held_out_and_at_least_one_sample() -> None:
    assert made_up_splits(1000) == {"train": 1000, "validation": 50}
    assert made_up_splits(1) == {"train": 1, "validation": 1}


def test_an_unknown_split_is_refused_with_the_nearest_one_and_all() -> None:
    with pytest.raises(SbpLookupError, match="did you mean 'validation'") as caught:
        size_of(made_up_splits(10), "validate", where="data")

    assert caught.value.accepted == "train, validation"


@pytest.mark.parametrize("number", [-1, 10])
def test_a_sample_that_is_not_there_is_refused(number: int) -> None:
    with pytest.raises(
        SbpValueError, match=f"'train' has no sample {number}\\n  in data"
    ) as caught:
        checked_numbers(np.array([3, number]), made_up_splits(10), "train", where="data")

    assert caught.value.accepted == "numbers in 0 to 9"
