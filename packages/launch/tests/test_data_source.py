"""What a data set returns is checked; the plugin is named, and the sample at which it fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, PluginError, SbpError
from sbp_core.plugins import Factory, PluginEntry
from sbp_launch.data import SampleSource, checked_dataset

ENTRY = PluginEntry(
    kind="data",
    name="mine",
    distribution="my-dist",
    version="1.2",
    api_version=1,
    factory=Factory(build="my_package.data:build"),
)


def loaded(found: object, numbers: Sequence[int] = (0, 1)) -> dict[str, torch.Tensor]:
    """Return what is loaded of a data set that returns `found`."""
    data: Any = SimpleNamespace(samples=lambda numbers, split: found)
    source = SampleSource(data=data, plugin=ENTRY, dtype=torch.float64)
    return source.load(np.array(numbers), "train")


@pytest.mark.parametrize("found", [None, [1, 2], {"tokens": [1, 2]}])
def test_a_data_set_that_returns_no_tensors_is_named(found: object) -> None:
    with pytest.raises(PluginError) as caught:
        loaded(found)

    kind = "None" if found is None else type(found).__name__
    assert caught.value.what == (
        f"data 'mine' of my-dist 1.2 returned {kind}, not a mapping name -> tensor"
    )
    assert caught.value.where == ("my_package.data:build, method samples",)


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
def test_a_tensor_that_has_not_the_samples_that_were_asked_for_is_named(
    shape: tuple[int, ...],
) -> None:
    with pytest.raises(PluginError) as caught:
        loaded({"y": torch.ones(2), "x": torch.ones(shape)})

    assert caught.value.what == (
        "data 'mine' of my-dist 1.2 returned Tensor, not tensors whose dim 0 is the 2 samples "
        f"asked for: 'x' has the shape {shape}"
    )


def test_floating_parts_of_samples_take_the_dtype_of_the_model() -> None:
    found = loaded({"x": torch.ones(2), "y": torch.ones(2, dtype=torch.int64)})

    assert (found["x"].dtype, found["y"].dtype) == (torch.float64, torch.int64)


@given(st.integers(1, 2**62), st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
def test_a_fingerprint_is_of_the_first_and_the_last_sample_and_some_between(
    size: int, dtype: str
) -> None:
    asked: list[int] = []

    def fingerprint(name: str = "x", shape: tuple[int, ...] = (2,), other: int = -1) -> str:
        def samples(numbers: npt.NDArray[np.int64], split: str) -> dict[str, torch.Tensor]:
            asked[:] = numbers.tolist()
            ones = (torch.from_numpy(numbers) == other).reshape(-1, *[1] * len(shape))
            return {name: ones.expand(-1, *shape).to(getattr(torch, dtype))}

        data: Any = SimpleNamespace(samples=samples, num_samples=lambda split: size)
        return SampleSource(data=data, plugin=ENTRY, dtype=torch.float64).fingerprint("train")

    found = fingerprint()

    assert asked[0] == 0 and asked[-1] == size - 1 and sorted(set(asked)) == asked
    assert len(asked) == min(size, 8)
    assert fingerprint() == found
    others = [fingerprint("y"), fingerprint(shape=(1, 2)), fingerprint(shape=())]
    others += [fingerprint(other=number) for number in list(asked)]
    assert len({found, *others}) == 1 + len(others)


def test_what_has_the_contract_of_version_1_is_refused_with_what_it_lacks() -> None:
    old = SimpleNamespace(batch=lambda index, batch_size, split: {}, describe=lambda: "old")

    with pytest.raises(PluginError, match="not a data set with the methods num_samples, samples"):
        checked_dataset(old, ENTRY)


@pytest.mark.parametrize("found", [None, 2.0, True, 0, -1])
def test_a_number_of_samples_that_is_none_is_named(found: object) -> None:
    data: Any = SimpleNamespace(num_samples=lambda split: found)

    with pytest.raises(PluginError, match="method num_samples\n  accepted here: an integer >= 1"):
        SampleSource(data=data, plugin=ENTRY, dtype=torch.float64).num_samples("train")


def test_a_data_set_is_asked_by_one_thread_at_a_time() -> None:
    asked: list[str] = []

    class Held:
        def num_samples(self, split: str) -> int:
            assert source._lock.locked()
            asked.append("num_samples")
            return 3

        def samples(self, numbers: Any, split: str) -> dict[str, torch.Tensor]:
            assert source._lock.locked()
            asked.append("samples")
            return {"x": torch.from_numpy(numbers)}

    source = SampleSource(data=Held(), plugin=ENTRY, dtype=torch.float64)  # type: ignore[arg-type]
    source.num_samples("train")
    source.load(np.array([1]), "train")

    assert asked == ["num_samples", "samples"]
    assert not source._lock.locked()


class Broken:
    """Sample 7 cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def samples(self, numbers: Any, split: str) -> dict[str, torch.Tensor]:
        if 7 in numbers:
            raise self.error
        return {"x": torch.from_numpy(numbers)}


def failure(error: Exception, numbers: Sequence[int]) -> SbpError:
    data: Any = Broken(error)
    with pytest.raises(SbpError) as caught:
        SampleSource(data=data, plugin=ENTRY, dtype=torch.float64).load(np.array(numbers), "held")
    return caught.value


@pytest.mark.parametrize("numbers", [[7], [3, 7, 5]])
def test_an_error_of_a_data_set_names_the_sample(numbers: list[int]) -> None:
    found = failure(KeyError("colour"), numbers)

    assert isinstance(found, PluginError)
    assert found.what == (
        "data 'mine' of my-dist 1.2 failed at sample 7 of split 'held': KeyError: 'colour'"
    )
    assert isinstance(found.__cause__, KeyError)


def test_an_error_of_ours_stays_what_it_is_and_names_the_sample() -> None:
    found = failure(ConfigError("cut off", where="a.txt, byte 12", accepted="whole files"), [1, 7])

    assert isinstance(found, ConfigError)
    assert found.where == ("a.txt, byte 12", "sample 7 of split 'held' of data 'mine'")
    assert found.accepted == "whole files"


class AugmentsTo:
    """Augments to what is given, or raises it."""

    def __init__(self, found: object) -> None:
        self.found = found

    def num_samples(self, split: str = "train") -> int:
        return 9

    def samples(self, numbers: Any, split: str = "train") -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(numbers)}

    def augment(self, samples: Any, numbers: Any, epochs: Any) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def describe(self) -> str:
        return "nothing"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "returned None, not a mapping name -> tensor"),
        ({"x": torch.ones(3)}, "'x' has the shape \\(3,\\)"),
        (ValueError("no pixels"), "failed at samples 4, 5 of split 'train': ValueError: no pixels"),
    ],
)
def test_what_augments_to_no_samples_is_named(found: object, says: str) -> None:
    data: Any = AugmentsTo(found)
    source = SampleSource(data=data, plugin=ENTRY, dtype=torch.float64)

    with pytest.raises(PluginError, match=says) as caught:
        source.load(np.array([4, 5]), "train", np.array([0, 1]))

    assert caught.value.where[0] == "my_package.data:build, method augment"
    assert source.load(np.array([4, 5]), "train")["x"].tolist() == [4, 5]
