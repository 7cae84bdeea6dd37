from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.knapsack import KnapsackItem, choose, evaluate


def item(size, seconds=1.0):
    return KnapsackItem(
        transient_bytes=2 * size,
        dp_bytes=4 * size,
        zdp_bytes=size,
        dp_s=2 * seconds,
        zdp_s=3 * seconds,
    )


@st.composite
def items(draw):
    dp_bytes = draw(st.integers(0, 9))
    return KnapsackItem(
        transient_bytes=draw(st.integers(0, 6)),
        dp_bytes=dp_bytes,
        zdp_bytes=draw(st.integers(0, dp_bytes)),
        dp_s=draw(st.integers(0, 3)),
        zdp_s=draw(st.integers(0, 5)),
    )


def all_choices(found, fixed_bytes=0):
    return [
        evaluate(found, sharded, fixed_bytes)
        for sharded in product([False, True], repeat=len(found))
    ]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(items(), max_size=6),
    st.lists(st.integers(0, 5), max_size=2),
    st.integers(0, 45),
    st.integers(0, 5),
)
def test_no_choice_that_fits_is_faster_or_as_fast_and_smaller(found, again, limit, fixed_bytes):
    found = [*found, *(found[index] for index in again if index < len(found))]
    fitting = [c for c in all_choices(found, fixed_bytes) if c.memory_bytes <= limit]

    choice = choose(found, limit, fixed_bytes)

    if not fitting:
        assert choice is None
    else:
        assert choice == evaluate(found, choice.sharded, fixed_bytes)
        best = min((c.seconds, c.memory_bytes) for c in fitting)
        assert (choice.seconds, choice.memory_bytes) == best


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(items(), max_size=6), st.integers(0, 40), st.integers(0, 10))
def test_more_memory_is_never_slower(found, limit, more):
    little, much = choose(found, limit), choose(found, limit + more)

    if little is not None:
        assert much.seconds <= little.seconds


def test_nothing_is_sharded_when_everything_fits():
    assert choose([item(10), item(20)], 120).sharded == (False, False)


def test_nothing_to_choose_from_fits_if_the_fixed_part_does():
    assert choose([], 10, 10).sharded == ()
    assert choose([], 9, 10) is None


def test_the_transient_of_a_large_item_can_make_smaller_ones_the_better_choice():
    # Sharding the large one saves 300, but needs 200 to gather it; three small save 90 each for 60.
    found = [item(100, seconds=2.0), item(30), item(30), item(30)]

    choice = choose(found, 4 * 190 - 200)

    assert choice.sharded == (False, True, True, True)


def test_equal_items_are_sharded_by_count():
    choice = choose([item(10)] * 5, 5 * 40 - 40)

    assert sum(choice.sharded) == 2


def test_two_hundred_items_of_few_classes_are_chosen_quickly():
    found = [item(10 + kind, seconds=1 + 0.01 * kind**1.5) for kind in range(8)] * 25
    total = sum(entry.dp_bytes for entry in found)

    choice = choose(found, 0.6 * total)

    assert choice.memory_bytes <= 0.6 * total
    assert 0 < sum(choice.sharded) < len(found)


@pytest.mark.parametrize(
    "changes", [{"dp_s": -1.0}, {"transient_bytes": -1}, {"dp_bytes": 1, "zdp_bytes": 2}]
)
def test_items_that_cannot_be_are_refused(changes):
    values = {"transient_bytes": 0, "dp_bytes": 4, "zdp_bytes": 1, "dp_s": 2.0, "zdp_s": 3.0}

    with pytest.raises(SbpValueError):
        KnapsackItem(**{**values, **changes})
