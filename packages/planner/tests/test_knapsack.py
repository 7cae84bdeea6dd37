import json
from itertools import product
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.knapsack import KnapsackOption, choose, evaluate


def option(resident_bytes, seconds, transient_bytes=0):
    return KnapsackOption(
        resident_bytes=resident_bytes, seconds=seconds, transient_bytes=transient_bytes
    )


def item(size, seconds=1.0):
    """A parameter with AdamW: replicated or sharded over four ranks."""
    return option(4 * size, 2 * seconds), option(size, 3 * seconds, 2 * size)


options = st.builds(option, st.integers(0, 9), st.integers(0, 5), st.integers(0, 6))
items = st.lists(options, min_size=1, max_size=4).map(tuple)


def all_choices(found, fixed_bytes=0):
    return [
        evaluate(found, chosen, fixed_bytes)
        for chosen in product(*(range(len(entry)) for entry in found))
    ]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(items, max_size=4),
    st.lists(st.integers(0, 4), max_size=2),
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
        assert choice == evaluate(found, choice.chosen, fixed_bytes)
        best = min((c.seconds, c.memory_bytes) for c in fitting)
        assert (choice.seconds, choice.memory_bytes) == best


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(items, max_size=6), st.integers(0, 40), st.integers(0, 10))
def test_more_memory_is_never_slower(found, limit, more):
    little, much = choose(found, limit), choose(found, limit + more)

    if little is not None:
        assert much.seconds <= little.seconds


def test_nothing_is_sharded_when_everything_fits():
    assert choose([item(10), item(20)], 120).chosen == (0, 0)


def test_what_is_faster_sharded_is_sharded_though_everything_fits():
    assert choose([item(10), (option(40, 2.0), option(10, 1.0, 20))], 1000).chosen == (0, 1)


def test_nothing_to_choose_from_fits_if_the_fixed_part_does():
    assert choose([], 10, 10).chosen == ()
    assert choose([], 9, 10) is None


def test_the_transient_of_a_large_item_can_make_smaller_ones_the_better_choice():
    # Sharding the large one saves 300, but needs 200 to gather it; three small save 90 each for 60.
    found = [item(100, seconds=2.0), item(30), item(30), item(30)]

    choice = choose(found, 4 * 190 - 200)

    assert choice.chosen == (0, 1, 1, 1)


def test_equal_items_are_sharded_by_count():
    choice = choose([item(10)] * 5, 5 * 40 - 40)

    assert sum(choice.chosen) == 2


@pytest.mark.slow
def test_two_hundred_items_of_few_classes_are_chosen_quickly():
    found = [item(10 + kind, seconds=1 + 0.01 * kind**1.5) for kind in range(8)] * 25
    total = sum(entry[0].resident_bytes for entry in found)

    choice = choose(found, 0.6 * total)

    assert choice.memory_bytes <= 0.6 * total
    assert 0 < sum(choice.chosen) < len(found)


@pytest.mark.parametrize("changes", [{"seconds": -1.0}, {"transient_bytes": -1}])
def test_options_that_cannot_be_are_refused(changes):
    with pytest.raises(SbpValueError):
        KnapsackOption(**{"resident_bytes": 4, "seconds": 2.0, **changes})


# The tables that were published with the paper: measured time and memory of one GPT block.

TABLES = json.loads(
    Path(__file__).with_name("data").joinpath("osdp_block_tables.json").read_text(encoding="utf-8")
)
#: What a rank has beside blocks, in MB, and the MB of the two limits of the paper.
FIXED_MB, LIMITS_MB = 800, (8_000, 16_000)


def blocks(hidden, row, num_layers):
    """Equal blocks with the options: nothing, attention, MLP, both sharded."""
    seconds, sizes = TABLES["time_s"][hidden][row], TABLES["mem_MB"][hidden][row]
    own = tuple(option(int(mb), s) for s, mb in zip(seconds, sizes, strict=True))
    return [own] * num_layers


def best_of_all_counts(own, num_layers, limit):
    """Return the least time of all ways to divide equal blocks among four options, or None."""
    times = []
    for first in range(num_layers + 1):
        for second in range(num_layers + 1 - first):
            for third in range(num_layers + 1 - first - second):
                counts = (first, second, third, num_layers - first - second - third)
                size = sum(n * o.resident_bytes for n, o in zip(counts, own, strict=True))
                if size + FIXED_MB <= limit:
                    times.append(sum(n * o.seconds for n, o in zip(counts, own, strict=True)))
    return min(times, default=None)


@pytest.mark.parametrize("limit", LIMITS_MB)
@pytest.mark.parametrize("hidden", range(8), ids=TABLES["hidden"])
def test_the_published_tables_are_solved_to_their_optimum(hidden, limit):
    num_layers = 16
    assert comb(num_layers + 3, 3) == 969  # ways to divide the blocks

    for row in range(5):
        found = blocks(hidden, row, num_layers)
        expected = best_of_all_counts(found[0], num_layers, limit)

        choice = choose(found, limit, FIXED_MB)

        if expected is None:
            assert choice is None
        else:
            assert choice.memory_bytes <= limit
            assert choice.seconds == pytest.approx(expected, rel=1e-12)


def test_the_published_plan_of_48_layers_is_found():
    # Of the authors' own run on 8 GPUs with 8 GB: two blocks shard attention, 46 shard the MLP.
    found = blocks(TABLES["hidden"].index(1536), 1, 48)

    choice = choose(found, 8192, FIXED_MB)

    assert [choice.chosen.count(mode) for mode in range(4)] == [0, 2, 46, 0]
    assert choice.seconds == pytest.approx(2.902, abs=5e-4)
