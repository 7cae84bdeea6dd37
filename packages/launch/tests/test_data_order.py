"""The order of samples: each once an epoch, for every size, seed, epoch and cut into batches."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, SbpError
from sbp_launch.data import DataCursor, SampleOrder
from sbp_launch.data.order import key_of, permute_indices

KEY = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), KEY)
def test_a_permutation_has_every_number_once(size: int, key: int) -> None:
    found = permute_indices(np.arange(size), size, key)

    assert np.array_equal(np.sort(found), np.arange(size))


@given(st.integers(2**31, 2**62), KEY, st.integers(0, 2**62), st.integers(1, 50))
def test_places_of_a_large_permutation_are_apart_and_within(
    size: int, key: int, start: int, count: int
) -> None:
    places = (start + np.arange(count)) % size

    found = permute_indices(places, size, key)

    assert len(set(found.tolist())) == count
    assert 0 <= found.min() <= found.max() < size


@pytest.mark.slow
@given(st.integers(1, 500), KEY, st.data())
def test_what_stands_at_a_place_does_not_depend_on_what_else_is_asked(
    size: int, key: int, data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)

    assert np.array_equal(
        permute_indices(places, size, key), permute_indices(np.arange(size), size, key)[places]
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", [2, 3, 5, 10, 64, 100])
def test_every_number_is_as_likely_at_every_place(size: int) -> None:
    epochs = 3000
    found = np.stack(
        [permute_indices(np.arange(size), size, key_of(1, epoch)) for epoch in range(epochs)]
    )

    for place in (0, size // 2, size - 1):
        counts = np.bincount(found[:, place], minlength=size)
        chi = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
        # The statistic has mean size - 1 and variance 2 (size - 1): six deviations.
        assert chi < size - 1 + 6 * (2 * (size - 1)) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    found = permute_indices(np.arange(10_000), 10_000, key_of(0, 0))

    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.002


def test_no_sample_takes_memory() -> None:
    tracemalloc.start()
    permute_indices(np.arange(100), 2**60, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 100_000


@pytest.mark.slow
@given(
    st.integers(1, 200),
    st.sampled_from(["shuffled", "sequential"]),
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
)
def test_whatever_the_sizes_of_batches_each_sample_is_taken_once_an_epoch(
    size: int, order: str, seed: int, batch_sizes: list[int]
) -> None:
    cursor = DataCursor(order=SampleOrder(num_samples=size, order=order, seed=seed))
    taken: list[int] = []

    while cursor.epoch < 2:
        batch_size = batch_sizes[len(taken) % len(batch_sizes)]
        taken += cursor.numbers(np.arange(batch_size)).tolist()
        cursor = cursor.advanced(batch_size)

    for epoch in range(2):
        assert sorted(taken[epoch * size :][:size]) == list(range(size))
    assert cursor.position == len(taken)


def test_epochs_and_seeds_are_shuffled_otherwise_and_sequential_ones_not_at_all() -> None:
    def epoch(number: int, **settings: object) -> list[int]:
        order = SampleOrder(num_samples=50, **settings)
        return order.numbers(50 * number + np.arange(50)).tolist()

    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=1)
    assert epoch(1) != epoch(0, seed=1)  # a run of the next seed is not this one, an epoch later
    assert epoch(3) == epoch(3)
    assert epoch(1, order="sequential") == list(range(50))


@given(st.integers(0, 2**62), st.integers(1, 2**62), st.integers(0, 2**63 - 1))
def test_a_cursor_survives_json(position: int, size: int, seed: int) -> None:
    cursor = DataCursor(position=position, order=SampleOrder(num_samples=size, seed=seed))

    assert DataCursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


def test_a_kept_cursor_says_everything_whatever_the_defaults_are() -> None:
    cursor = DataCursor(order=SampleOrder(num_samples=9))

    assert cursor.to_json() == {
        "position": 0,
        "order": {"num_samples": 9, "order": "shuffled", "seed": 0, "fingerprint": ""},
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "cursor"),
        ({"position": 3}, "order"),
        ({"position": -1, "order": {"num_samples": 5}}, "position is -1"),
        ({"position": 2**62 + 1, "order": {"num_samples": 5}}, "2^62"),
        ({"position": 1.5, "order": {"num_samples": 5}}, "1.5"),
        ({"position": 1, "order": {"num_samples": 0}}, "num_samples is 0"),
        ({"position": 1, "order": {"num_samples": 5, "order": "random"}}, "random"),
        ({"position": 1, "order": {"num_samples": 5, "seed": -1}}, "seed is -1"),
        ({"position": 1, "order": {"num_samples": 5, "sed": 1}}, "seed"),
        ({"position": True, "order": {"num_samples": 5}}, "an integer"),
    ],
)
def test_what_is_no_cursor_is_refused_with_its_key(value: object, says: str) -> None:
    with pytest.raises(SbpError) as caught:
        DataCursor.from_json(value, where="manifest.json, cursor")

    assert says in str(caught.value)
    assert "manifest.json" in str(caught.value)


def test_other_data_another_order_or_seed_are_refused_when_a_run_goes_on() -> None:
    known = SampleOrder(num_samples=10, fingerprint="12")
    cursor = DataCursor(position=7, order=known)

    cursor.check_same_data(known)
    cursor.check_same_data(replace(known, fingerprint=""))
    for changes, says in (
        ({"num_samples": 11}, "the train split had 10 samples, and has 11"),
        ({"fingerprint": "13"}, "the samples of the train split have changed"),
        ({"seed": 1}, "trainer.seed was 0, and is 1"),
        ({"order": "sequential"}, "trainer.order was shuffled, and is sequential"),
    ):
        with pytest.raises(
            ConfigError, match=f"these are not the data that the run stopped in: {says}"
        ) as caught:
            cursor.check_same_data(replace(known, **changes), where="manifest.json")
        assert "trainer.allow_other_data=true" in caught.value.todo


@pytest.mark.parametrize("settings", [{"num_samples": 0}, {"num_samples": 2**62 + 1}])
def test_an_order_of_too_few_or_too_many_samples_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SbpError, match="an integer in 1 to"):
        SampleOrder(**settings)
