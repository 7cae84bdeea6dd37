import numpy as np
import pytest

from sbp_core.errors import ConfigError, SbpLookupError, SbpValueError
from sbp_models.splits import SplitDataset, made_up_splits


class Numbers(SplitDataset):
    """Samples that are their numbers."""

    def samples(self, numbers: object, split: str = "train") -> list[int]:
        return self._checked(numbers, split).tolist()  # type: ignore[arg-type]


def made_up() -> Numbers:
    return Numbers(made_up_splits(10), label="data")


def test_a_twentieth_is_held_out_and_at_least_one_sample() -> None:
    assert made_up_splits(1000) == {"train": 1000, "validation": 50}
    assert made_up_splits(1) == {"train": 1, "validation": 1}


def test_an_unknown_split_is_refused_with_the_nearest_one_and_all() -> None:
    for ask in (made_up().num_samples, lambda split: made_up().samples([0], split)):
        with pytest.raises(SbpLookupError, match="did you mean 'validation'") as caught:
            ask("validate")

        assert caught.value.accepted == "train, validation"


@pytest.mark.parametrize("number", [-1, 10])
def test_a_sample_that_is_not_there_is_refused(number: int) -> None:
    with pytest.raises(
        SbpValueError, match=f"'train' has no sample {number}\\n  in data"
    ) as caught:
        made_up().samples(np.array([3, number]))

    assert caught.value.accepted == "numbers in 0 to 9"
    assert made_up().samples(np.array([3, 9])) == [3, 9]


def test_a_split_without_samples_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="data: 7 samples, and none for the split 'validation'"):
        Numbers({"train": 7, "validation": 0}, label="data")
