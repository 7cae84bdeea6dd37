"""The suite of data sets: passed by a small data set of text, failed by broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor

from sbp_core.errors import unknown_name
from sbp_torch.kinds import Dataset
from sbp_torch.testing.data import DatasetConformance


class Counts:
    """Sample `i` of `train` is the number 2 i, of `validation` 2 i + 1, in ten bytes."""

    vocabulary = 256

    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        if split not in ("train", "validation"):
            raise unknown_name("split", split, ("train", "validation"))
        first = index * batch_size
        rows = [
            list(f"{2 * i + (split == 'validation'):010d}".encode())
            for i in range(first, first + batch_size)
        ]
        return {"tokens": torch.tensor(rows)}

    def describe(self) -> str:
        return "numbers, for ever"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode()


class TestCounts(DatasetConformance):
    splits = ("train", "validation")
    prefix_property = True

    def make_dataset(self) -> Dataset:
        return Counts()


class GoesOnFromTheLastBatch(Counts):
    calls = 0

    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        self.calls += 1
        return super().batch(self.calls if split == "train" else index, batch_size, split)


class MixesItsSplits(Counts):
    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        return super().batch(index, batch_size, "train" if split == "validation" else split)


class DependsOnTheBatchSize(Counts):
    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        return super().batch(index + 100 * batch_size, batch_size, split)


class IsAlwaysTheSame(Counts):
    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        return super().batch(0, batch_size, split)


class GivesOneTooMany(Counts):
    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        return super().batch(index, batch_size + 1, split)


class TakesAnySplit(Counts):
    def batch(self, index: int, batch_size: int, split: str = "train") -> Mapping[str, Tensor]:
        return super().batch(index, batch_size)


class SaysTooMuch(Counts):
    def describe(self) -> str:
        return "numbers,\nfor ever"


class ForgetsCapitals(Counts):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


Test = Callable[[DatasetConformance], None]

BROKEN: list[tuple[Callable[[], Dataset], Test]] = [
    (GoesOnFromTheLastBatch, DatasetConformance.test_a_batch_is_a_pure_function_of_its_index),
    (MixesItsSplits, DatasetConformance.test_splits_hold_other_samples),
    (DependsOnTheBatchSize, DatasetConformance.test_every_batch_size_sees_the_same_samples),
    (IsAlwaysTheSame, DatasetConformance.test_batches_differ_in_values_only),
    (GivesOneTooMany, DatasetConformance.test_a_batch_has_as_many_samples_as_asked_for),
    (SaysTooMuch, DatasetConformance.test_the_description_is_one_line),
    (ForgetsCapitals, DatasetConformance.test_text_comes_back_from_its_tokens),
]


def suite_of(make: Callable[[], Dataset]) -> DatasetConformance:
    class Suite(TestCounts):
        def make_dataset(self) -> Dataset:
            return make()

    return Suite()


@pytest.mark.parametrize(("make", "test"), BROKEN)
def test_a_broken_data_set_fails_the_suite(make: Callable[[], Dataset], test: Test) -> None:
    suite = suite_of(make)

    with pytest.raises(AssertionError):
        test(suite)


def test_a_data_set_that_takes_any_split_fails_the_suite() -> None:
    suite = suite_of(TakesAnySplit)

    with pytest.raises(AssertionError, match="no SbpError"):
        suite.test_a_split_that_is_not_there_is_refused()
