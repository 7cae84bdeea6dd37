import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_models.counter_based_random import (
    below,
    hashes,
    key_of,
    members,
    normal,
    uniform,
)

COUNTS = np.arange(20000, dtype=np.uint64)


def test_the_numbers_are_those_of_splitmix64() -> None:
    # The generator's second output from the state 1234567 on is that of the count 2.
    found = hashes(1234567, np.arange(1, 4, dtype=np.uint64)).tolist()

    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_are_spread_as_they_should_be() -> None:
    u, n, b = uniform(3, COUNTS), normal(3, COUNTS), below(3, COUNTS, 7)

    assert u.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(u, bins=10, range=(0, 1))[0] == pytest.approx(2000, rel=0.1)
    assert n.mean() == pytest.approx(0, abs=0.03)
    assert n.std() == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(n) < 1) == pytest.approx(0.6827, abs=0.02)
    assert np.bincount(b) == pytest.approx(20000 / 7, rel=0.1)


def test_neighbours_and_other_keys_are_not_correlated() -> None:
    n = normal(3, COUNTS)

    assert abs(np.corrcoef(n[:-1], n[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(n, normal(4, COUNTS))[0, 1]) < 0.03


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_a_uniform_number_is_never_zero_and_a_normal_one_always_finite(
    key: int, count: int
) -> None:
    counts = np.array([count], dtype=np.uint64)

    assert 0 < uniform(key, counts)[0] <= 1
    assert np.isfinite(normal(key, counts)).all()


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 9))
def test_the_members_of_different_samples_are_different(
    index: int, batch_size: int, size: int
) -> None:
    first = index * batch_size
    numbers = np.arange(first, first + batch_size, dtype=np.uint64)

    found = members(numbers, size)

    first *= size
    assert found.shape == (batch_size, size)
    assert found.flatten().tolist() == list(range(first, first + batch_size * size))


def test_keys_differ_by_every_part() -> None:
    keys = {key_of(0, "train"), key_of(1, "train"), key_of(0, "validation"), key_of("train", 0)}

    assert len(keys) == 4
    assert all(0 <= key < 2**64 for key in keys)
