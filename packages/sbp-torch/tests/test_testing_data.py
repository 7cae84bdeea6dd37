"""The suite of data sets: passed by a small data set of text, failed by broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import get_ident

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from sbp_core.errors import SbpLookupError, unknown_name
from sbp_torch.kinds import Dataset
from sbp_torch.testing.data import DatasetConformance

Numbers = npt.NDArray[np.int64]


class Counts:
    """Sample `i` of `train` is the number 2 i, of `validation` 2 i + 1, in ten bytes."""

    vocabulary = 256

    def num_samples(self, split: str = "train") -> int:
        if split not in ("train", "validation"):
            raise unknown_name("split", split, ("train", "validation"))
        return 100

    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        self.num_samples(split)
        rows = [list(f"{2 * i + (split == 'validation'):010d}".encode()) for i in numbers]
        return {"tokens": torch.tensor(rows)}

    def describe(self) -> str:
        return "numbers, for ever"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode()


class TestCounts(DatasetConformance):
    splits = ("train", "validation")

    def make_dataset(self) -> Dataset:
        return Counts()


class GoesOnFromTheLastSample(Counts):
    calls = 0

    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        self.calls += 1
        return super().samples(numbers + self.calls, split)


class MixesItsSplits(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(numbers, "train" if split == "validation" else split)


class DependsOnTheOtherSamples(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(numbers + 100 * len(numbers), split)


class SortsThem(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(np.sort(numbers), split)


class IsAlwaysTheSame(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(0 * numbers, split)


class GivesOneTooMany(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(np.append(numbers, 0), split)


class IsLongerInValidation(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        tokens = super().samples(numbers, split)["tokens"]
        return {"tokens": tokens if split == "train" else tokens[:, :9]}


class IsEmpty(Counts):
    def num_samples(self, split: str = "train") -> int:
        return 0 * super().num_samples(split)


class Grows(Counts):
    size = 100

    def num_samples(self, split: str = "train") -> int:
        self.size += super().num_samples(split)
        return self.size


class BelongsToAThread(Counts):
    def __init__(self) -> None:
        self.thread = get_ident()

    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(numbers + (get_ident() != self.thread), split)


class TakesAnySplit(Counts):
    def samples(self, numbers: Numbers, split: str = "train") -> Mapping[str, Tensor]:
        return super().samples(numbers)


class SaysTooMuch(Counts):
    def describe(self) -> str:
        return "numbers,\nfor ever"


class ForgetsCapitals(Counts):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


class Adds(Counts):
    """In epoch `e`, a token is `e` more."""

    def augment(
        self, samples: Mapping[str, Tensor], numbers: Numbers, epochs: Numbers
    ) -> Mapping[str, Tensor]:
        return {"tokens": samples["tokens"] + torch.from_numpy(epochs)[:, None]}


class TestAdds(DatasetConformance):
    splits = ("train", "validation")

    def make_dataset(self) -> Dataset:
        return Adds()


class AddsThePlace(Adds):
    def augment(
        self, samples: Mapping[str, Tensor], numbers: Numbers, epochs: Numbers
    ) -> Mapping[str, Tensor]:
        return super().augment(samples, numbers, np.arange(len(numbers)))


class AddsFloats(Adds):
    def augment(
        self, samples: Mapping[str, Tensor], numbers: Numbers, epochs: Numbers
    ) -> Mapping[str, Tensor]:
        return {"tokens": samples["tokens"].double()}


Test = Callable[[DatasetConformance], None]
Suite = DatasetConformance

BROKEN: list[tuple[Callable[[], Dataset], Test]] = [
    (GoesOnFromTheLastSample, Suite.test_a_sample_is_a_pure_function_of_its_number),
    (DependsOnTheOtherSamples, Suite.test_a_sample_is_a_pure_function_of_its_number),
    (SortsThem, Suite.test_a_sample_is_a_pure_function_of_its_number),
    (BelongsToAThread, Suite.test_another_thread_finds_the_same_samples),
    (MixesItsSplits, Suite.test_splits_hold_other_samples),
    (IsAlwaysTheSame, Suite.test_samples_differ_in_values_only),
    (GivesOneTooMany, Suite.test_samples_differ_in_values_only),
    (IsLongerInValidation, Suite.test_samples_differ_in_values_only),
    (IsEmpty, Suite.test_every_split_has_samples),
    (Grows, Suite.test_every_split_has_samples),
    (SaysTooMuch, Suite.test_the_description_is_one_line),
    (AddsThePlace, Suite.test_what_an_epoch_makes_of_a_sample_depends_on_these_two_alone),
    (AddsFloats, Suite.test_what_an_epoch_makes_of_a_sample_depends_on_these_two_alone),
    (ForgetsCapitals, Suite.test_text_comes_back_from_its_tokens),
]


def suite_of(make: Callable[[], Dataset]) -> DatasetConformance:
    class Made(TestCounts):
        def make_dataset(self) -> Dataset:
            return make()

    return Made()


@pytest.mark.parametrize(("make", "test"), BROKEN)
def test_a_broken_data_set_fails_the_suite(make: Callable[[], Dataset], test: Test) -> None:
    suite = suite_of(make)

    with pytest.raises(AssertionError):
        test(suite)


def test_a_data_set_that_takes_any_split_fails_the_suite() -> None:
    suite = suite_of(TakesAnySplit)

    with pytest.raises(AssertionError, match="no SbpError"):
        suite.test_a_split_that_is_not_there_is_refused()


def test_the_suite_looks_at_the_first_and_the_last_sample() -> None:
    data = Counts()

    found = TestCounts().numbers(data, "train")

    assert {*range(10), 99} <= set(found)
    with pytest.raises(SbpLookupError):
        TestCounts().numbers(data, "test")
