import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.units import format_bytes, format_flop, format_ranges, format_seconds


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (9999, "9999 B"), (10_000, "10.0 kB"), (999_960, "1.0 MB"), (2.5e12, "2.5 TB")],
)
def test_bytes_are_printed_in_decimal_units(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(90.0, "90 s"), (1.2345, "1.23 s"), (0.9996, "1 s"), (0.0173, "17.3 ms"), (4.2e-5, "42 µs")],
)
def test_durations_are_printed_with_three_digits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("work_flop", "text"),
    [(0, "0 FLOP"), (210.0, "210 FLOP"), (8192, "8.19 kFLOP"), (34.36e9, "34.4 GFLOP")],
)
def test_work_is_printed_with_decimal_prefixes(work_flop, text):
    assert format_flop(work_flop) == text


@settings(derandomize=True, max_examples=200)
@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranges_are_as_few_as_say_each_number_once(numbers):
    text = format_ranges(numbers)

    ends = [[int(end) for end in run.split("-")] for run in text.split(",")]
    read = [number for run in ends for number in range(run[0], run[-1] + 1)]
    assert read == sorted(numbers)
    assert all(after[0] > before[-1] + 1 for before, after in itertools.pairwise(ends))
