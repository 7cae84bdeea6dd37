"""The conformance suite of data sets: subclass `DatasetConformance` and supply one method.

    class TestMyData(DatasetConformance):
        splits = ("train", "validation")
        def make_dataset(self):
            return build(MyConfig())

`prefix_property = True` claims that every batch size sees the same sequence of samples. A data set
that also fulfils `TextDataset` is checked as one.

Stability: stable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from unittest import SkipTest

import torch

from sbp_core.errors import SbpError
from sbp_torch.kinds import Dataset, TextDataset
from sbp_torch.testing.programs import assert_equal, raises

__all__ = ["DatasetConformance"]


class DatasetConformance(ABC):
    """What every data set must do. See the module's docstring for how to use it."""

    #: Names of its splits; the first is the one to train on.
    splits: tuple[str, ...] = ("train",)

    #: Whether sample `i` is the same whatever the batch size.
    prefix_property: bool = False

    #: Samples of a batch; even.
    batch_size: int = 4

    #: Batches of each split to look at.
    num_batches: int = 5

    #: Texts that must come back from their tokens.
    texts: tuple[str, ...] = ("", "The quick brown fox.\n", "def f(x): return x + 1")

    @abstractmethod
    def make_dataset(self) -> Dataset:
        """Return the data set; called for every test."""

    def test_a_batch_is_a_pure_function_of_its_index(self) -> None:
        """Whatever was asked before, and on another object, a batch is the same."""
        first, other = self.make_dataset(), self.make_dataset()
        for split in self.splits:
            forth = [first.batch(i, self.batch_size, split) for i in range(self.num_batches)]
            back = [other.batch(i, self.batch_size, split) for i in reversed(range(len(forth)))]
            for batch, again in zip(forth, reversed(back), strict=True):
                assert set(batch) == set(again), f"{set(batch)} and {set(again)}"
                for name, value in batch.items():
                    assert_equal(f"{name} of split {split}", again[name], value)

    def test_batches_differ_in_values_only(self) -> None:
        """Same names, shapes and dtypes; dim 0 is the sample; not all batches are equal."""
        data = self.make_dataset()
        for split in self.splits:
            batches = [data.batch(i, self.batch_size, split) for i in range(self.num_batches)]
            kinds = [{n: (v.shape, v.dtype) for n, v in batch.items()} for batch in batches]
            assert all(kind == kinds[0] for kind in kinds), f"split {split}: {kinds}"
            for name, (shape, _) in kinds[0].items():
                assert shape[:1] == (self.batch_size,), f"{name} has shape {tuple(shape)}"
            assert any(
                not torch.equal(value, batch[name])
                for batch in batches[1:]
                for name, value in batches[0].items()
            ), f"all batches of split {split} are equal"

    def test_a_batch_has_as_many_samples_as_asked_for(self) -> None:
        """For sizes 1, 2 and 3 times the usual."""
        data = self.make_dataset()
        for size in (1, 2, 3 * self.batch_size):
            for name, value in data.batch(0, size, self.splits[0]).items():
                assert value.shape[0] == size, f"{name} has {value.shape[0]} samples, not {size}"

    def test_every_batch_size_sees_the_same_samples(self) -> None:
        """A batch is its two halves, taken as batches of half the size."""
        if not self.prefix_property:
            raise SkipTest("the data set does not claim it")
        data, half = self.make_dataset(), self.batch_size // 2
        for split in self.splits:
            for index in range(self.num_batches):
                batch = data.batch(index, self.batch_size, split)
                first, second = (data.batch(2 * index + i, half, split) for i in (0, 1))
                for name, value in batch.items():
                    halves = torch.cat([first[name], second[name]])
                    assert_equal(f"{name} of batch {index} of split {split}", halves, value)

    def test_splits_hold_other_samples(self) -> None:
        """No sample of one split turns up in the batches of another."""
        data = self.make_dataset()
        seen: dict[str, set[bytes]] = {split: set() for split in self.splits}
        for split in self.splits:
            for index in range(self.num_batches):
                batch = data.batch(index, self.batch_size, split)
                for row in range(self.batch_size):
                    parts = (batch[name][row].contiguous() for name in sorted(batch))
                    seen[split].add(b"".join(part.numpy().tobytes() for part in parts))
        for place, split in enumerate(self.splits):
            for other in self.splits[place + 1 :]:
                assert not seen[split] & seen[other], f"{split} and {other} share samples"

    def test_a_split_that_is_not_there_is_refused(self) -> None:
        """With an error of ours, which lists the splits."""
        with raises(SbpError, match=self.splits[0]):
            self.make_dataset().batch(0, 1, "no such split")

    def test_the_description_is_one_line(self) -> None:
        """Not empty."""
        text = self.make_dataset().describe()
        assert text.strip(), "the description is empty"
        assert len(text.splitlines()) == 1, f"the description has several lines: {text!r}"

    def test_text_comes_back_from_its_tokens(self) -> None:
        """Tokens are numbers below the vocabulary, in batches too."""
        data = self.make_dataset()
        if not isinstance(data, TextDataset):
            raise SkipTest("this is no data set of text")
        for text in self.texts:
            tokens = data.encode(text)
            assert all(0 <= token < data.vocabulary for token in tokens), f"{text!r}: {tokens}"
            assert data.decode(tokens) == text, f"{text!r} came back as {data.decode(tokens)!r}"
        for name, value in data.batch(0, self.batch_size, self.splits[0]).items():
            if not value.dtype.is_floating_point:
                low, high = int(value.min()), int(value.max())
                assert 0 <= low <= high < data.vocabulary, f"{name} holds {low} to {high}"
