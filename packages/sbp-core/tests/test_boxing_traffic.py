"""What a rank hands over is counted from the sizes of buffers; over all ranks it adds up."""

from __future__ import annotations

import pytest

from sbp_core.boxing.manifest import TrafficCounter


def test_an_exchange_counts_what_does_not_stay() -> None:
    meter = TrafficCounter(3, 1)

    meter.exchange([5, 7, 0], 4)

    assert meter.take() == 20
    assert meter.take() == 0, "each byte is taken once"


def test_an_even_exchange_keeps_one_part_of_all() -> None:
    meter = TrafficCounter(4, 3)

    meter.even_exchange(80)

    assert meter.take() == 60


def test_an_all_gather_sends_its_part_to_each_other_rank() -> None:
    meter = TrafficCounter(4, 0)

    meter.all_gather(10)
    meter.all_gather(1)

    assert meter.take() == 33


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("elements", [0, 1, 7, 60])
def test_all_reduces_of_all_ranks_add_up_to_twice_the_others(num_ranks: int, elements: int) -> None:
    meters = [TrafficCounter(num_ranks, place) for place in range(num_ranks)]

    for meter in meters:
        meter.all_reduce(elements, 8)

    assert sum(meter.take() for meter in meters) == 2 * (num_ranks - 1) * elements * 8
