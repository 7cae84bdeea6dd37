"""Offsets of buffers in one arena."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.memory.offsets import ALIGNMENT_BYTES, Interval, pack

_INTERVALS = st.lists(
    st.builds(
        lambda size, start, length: Interval(size, start, start + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=40,
)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@given(_INTERVALS)
def test_no_two_intervals_overlap_in_time_and_space(intervals: list[Interval]) -> None:
    found = pack(intervals)

    for at, one in enumerate(intervals):
        assert found.offsets[at] % ALIGNMENT_BYTES == 0
        assert 0 <= found.offsets[at] <= found.size_bytes - one.size_bytes
        for other_at, other in enumerate(intervals[:at]):
            if one.start <= other.end and other.start <= one.end:
                apart = (
                    found.offsets[at] + one.size_bytes <= found.offsets[other_at]
                    or found.offsets[other_at] + other.size_bytes <= found.offsets[at]
                )
                assert apart or not one.size_bytes or not other.size_bytes


@given(_INTERVALS)
def test_the_arena_holds_what_is_alive_at_once_and_no_more_than_everything(
    intervals: list[Interval],
) -> None:
    found = pack(intervals)

    ticks = range(50)
    alive = [sum(_aligned(i.size_bytes) for i in intervals if i.start <= t <= i.end) for t in ticks]
    assert found.lower_bound == max(alive)
    assert found.lower_bound <= found.size_bytes <= sum(_aligned(i.size_bytes) for i in intervals)


@given(st.integers(2, 20), st.integers(1, 5000))
def test_a_chain_of_equal_buffers_takes_turns_in_two_places(length: int, size: int) -> None:
    found = pack([Interval(size, at, at + 1) for at in range(length)])

    assert found.size_bytes == found.lower_bound == 2 * _aligned(size)
    assert len(set(found.offsets)) == 2


def test_a_buffer_takes_the_place_that_another_left() -> None:
    found = pack([Interval(64, 0, 1), Interval(64, 1, 3), Interval(64, 2, 3)])

    assert found.size_bytes == 128
    assert found.offsets[0] == found.offsets[2] != found.offsets[1]


def test_nothing_needs_no_arena() -> None:
    found = pack([])

    assert (found.size_bytes, found.lower_bound, found.excess) == (0, 0, 0.0)


@pytest.mark.parametrize("wrong", [Interval(-1, 0, 0), Interval(8, 2, 1)])
def test_what_is_no_interval_is_refused(wrong: Interval) -> None:
    with pytest.raises(ValueError, match="no interval"):
        pack([wrong])
