"""The conformance suite of data sets: subclass `DatasetConformance` and supply one method.

    class TestMyData(DatasetConformance):
        splits = ("train", "validation")
        def make_dataset(self):
            return build(MyConfig())

A data set that also implements `TextDataset` or `AugmentedDataset` gets further tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from threading import Thread
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from sbp_core.errors import SbpError
from sbp_torch.kinds import AugmentedDataset, Dataset, TextDataset
from sbp_torch.testing.programs import assert_equal, raises

__all__ = ["DatasetConformance"]


class DatasetConformance(ABC):
    """Tests of a data set. See the module's docstring for how to use it."""

    #: Names of its splits; the first split is for training.
    splits: tuple[str, ...] = ("train",)

    #: Largest number of samples of each split to test.
    most_samples: int = 20

    #: Texts to encode and decode.
    texts: tuple[str, ...] = ("", "The quick brown fox.\n", "def f(x): return x + 1")

    @abstractmethod
    def make_dataset(self) -> Dataset:
        """Return the data set; called for every test."""

    def numbers(self, data: Dataset, split: str) -> list[int]:
        """Return the samples of a split to test: the first ones, some in between, and the last."""
        size = data.num_samples(split)
        spread = np.linspace(0, size - 1, num=min(size, self.most_samples)).astype(int).tolist()
        return sorted({*range(min(size, self.most_samples // 2)), *spread})

    def test_every_split_has_samples(self) -> None:
        """The number is the same at each call, also on another object."""
        first, other = self.make_dataset(), self.make_dataset()
        for split in self.splits:
            size = first.num_samples(split)
            assert isinstance(size, int), f"split {split} has {size!r} samples"
            assert size >= 1, f"split {split} has {size} samples"
            again = (first.num_samples(split), other.num_samples(split))
            assert again == (size, size), f"split {split} has {size} samples, then {again}"

    def test_a_sample_is_a_pure_function_of_its_number(self) -> None:
        """It depends on no earlier call, object, or other sample of the call, in any order."""
        first, other = self.make_dataset(), self.make_dataset()
        for split in self.splits:
            numbers = self.numbers(first, split)
            together = _read_samples(first, numbers, split)
            alone = [_read_samples(other, [number], split) for number in reversed(numbers)]
            shuffled = [*numbers[1::2], *numbers[::-2], numbers[0]]
            again = _read_samples(first, shuffled, split)
            for name, value in together.items():
                what = f"{name} of split {split}"
                assert_equal(what, torch.cat([one[name] for one in reversed(alone)]), value)
                rows = [numbers.index(number) for number in shuffled]
                assert_equal(f"{what}, in another order", again[name], value[rows])

    def test_another_thread_finds_the_same_samples(self) -> None:
        """A thread that did not create the data set can load samples."""
        data, found = self.make_dataset(), []
        numbers = self.numbers(data, self.splits[0])
        thread = Thread(target=lambda: found.append(_read_samples(data, numbers, self.splits[0])))
        thread.start()
        thread.join()
        assert found, "the other thread failed"
        for name, value in _read_samples(data, numbers, self.splits[0]).items():
            assert_equal(f"{name}, by another thread", found[0][name], value)

    def test_samples_differ_in_values_only(self) -> None:
        """Same names, shapes and dtypes in all splits; not all samples are equal."""
        data, kinds = self.make_dataset(), []
        for split in self.splits:
            numbers = self.numbers(data, split)
            samples = _read_samples(data, numbers, split)
            for name, value in samples.items():
                assert value.shape[:1] == (len(numbers),), (
                    f"{name} has shape {tuple(value.shape)} for {len(numbers)} samples"
                )
            kinds.append({n: (v.shape[1:], v.dtype) for n, v in samples.items()})
            one = _read_samples(data, numbers[:1], split)
            kinds.append({n: (v.shape[1:], v.dtype) for n, v in one.items()})
            assert len(numbers) == 1 or any(
                not torch.equal(row, value[0]) for value in samples.values() for row in value[1:]
            ), f"all samples of split {split} are equal"
        assert all(kind == kinds[0] for kind in kinds), f"{kinds}"

    def test_splits_hold_other_samples(self) -> None:
        """No sample is in two splits."""
        data = self.make_dataset()
        seen: dict[str, set[bytes]] = {split: set() for split in self.splits}
        for split in self.splits:
            numbers = self.numbers(data, split)
            samples = _read_samples(data, numbers, split)
            for row in range(len(numbers)):
                parts = (samples[name][row].contiguous() for name in sorted(samples))
                seen[split].add(b"".join(part.numpy().tobytes() for part in parts))
        for place, split in enumerate(self.splits):
            for other in self.splits[place + 1 :]:
                assert not seen[split] & seen[other], f"{split} and {other} share samples"

    def test_a_split_that_is_not_there_is_refused(self) -> None:
        """An `SbpError` lists the splits."""
        data = self.make_dataset()
        with raises(SbpError, match=self.splits[0]):
            data.num_samples("no such split")
        with raises(SbpError, match=self.splits[0]):
            _read_samples(data, [0], "no such split")

    def test_the_description_is_one_line(self) -> None:
        """It is not empty."""
        text = self.make_dataset().describe()
        assert text.strip(), "the description is empty"
        assert len(text.splitlines()) == 1, f"the description has several lines: {text!r}"

    def test_what_an_epoch_makes_of_a_sample_depends_on_these_two_alone(self) -> None:
        """It does not depend on the rest of the batch; only values change."""
        data, other = self.make_dataset(), self.make_dataset()
        if not isinstance(data, AugmentedDataset) or not isinstance(other, AugmentedDataset):
            raise SkipTest("this data set does not augment")
        numbers = np.array(self.numbers(data, self.splits[0]) * 2)
        epochs = np.arange(len(numbers)) * 3 // len(numbers)
        samples = data.samples(numbers, self.splits[0])
        before = {name: value.clone() for name, value in samples.items()}
        together = data.augment(samples, numbers, epochs)
        assert {n: (v.shape, v.dtype) for n, v in together.items()} == {
            n: (v.shape, v.dtype) for n, v in before.items()
        }, "augmented samples have other names, shapes or dtypes"
        for row in reversed(range(len(numbers))):
            at = slice(row, row + 1)
            alone = {name: value[at] for name, value in before.items()}
            for name, value in other.augment(alone, numbers[at], epochs[at]).items():
                assert_equal(f"{name}, augmented alone", value, together[name][at])

    def test_text_comes_back_from_its_tokens(self) -> None:
        """Tokens are numbers below the size of the vocabulary, also in samples."""
        data = self.make_dataset()
        if not isinstance(data, TextDataset):
            raise SkipTest("this is no data set of text")
        for text in self.texts:
            tokens = data.encode(text)
            assert all(0 <= token < data.vocabulary for token in tokens), f"{text!r}: {tokens}"
            assert data.decode(tokens) == text, f"{text!r} came back as {data.decode(tokens)!r}"
        numbers = self.numbers(data, self.splits[0])
        tokens_of = _read_samples(data, numbers, self.splits[0]).get("tokens")
        if tokens_of is not None:
            low, high = int(tokens_of.min()), int(tokens_of.max())
            assert 0 <= low <= high < data.vocabulary, f"tokens holds {low} to {high}"


def _read_samples(data: Dataset, numbers: Sequence[int], split: str) -> Mapping[str, Tensor]:
    return data.samples(np.array(numbers, dtype=np.int64), split)
