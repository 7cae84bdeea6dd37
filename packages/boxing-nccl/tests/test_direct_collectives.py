from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_mpi import MPI, Comm, Network
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_boxing_nccl.mpi import direct_collectives
from sbp_boxing_nccl.mpi.direct_collectives import DirectCollectives
from sbp_boxing_nccl.mpi.mpi_group import MpiWork
from sbp_boxing_nccl.mpi.tensors import chunks, memory, reduce_into


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    """Chunks of 16 bytes, so that a few numbers make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_collectives, "_LEAST_BYTES", 16)
        patch.setattr(direct_collectives, "_MOST_BYTES", 16)
        patch.setattr(direct_collectives, "_WHOLE_BYTES", 32)
        patch.setattr(direct_collectives, "_WINDOW", 2)
        yield


def run(
    ends: list[DirectCollectives], start: Callable[[int], Any], choose: Callable[[int], int]
) -> None:
    """Run a collective on all ranks, one look at a time, in an order that `choose(count)` says."""
    network = ends[0]._comm.network
    works = [MpiWork(request=start(rank), tensors=()) for rank in range(len(ends))]
    while sum(work.look() for work in works) < len(works):
        assert network.matched, "nobody can go on"
        network.deliver(choose(len(network.matched)))
    assert not network.matched
    assert not any([*network.sent.values(), *network.awaited.values()])


def connected(size: int) -> list[DirectCollectives]:
    network = Network(size)
    return [DirectCollectives(Comm(network, rank), MPI) for rank in range(size)]


class Choices:
    """Draws which message arrives next."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._generator))


def values_of(size: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(length, generator=generator).mul(10.0 ** (3 * rank)).to(dtype)
        for rank in range(size)
    ]


SIZES = st.integers(2, 5)
LENGTHS = st.integers(0, 60)
SEEDS = st.integers(0, 2**16)
REDUCTIONS = st.sampled_from(["sum", "max", "min"])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


@settings(deadline=None)
@given(SIZES, LENGTHS, DTYPES, REDUCTIONS, st.booleans(), SEEDS)
def test_an_all_reduce_gives_all_ranks_the_sum_in_rank_order(
    size: int, length: int, dtype: torch.dtype, reduction: str, in_place: bool, seed: int
) -> None:
    given_values = values_of(size, length, dtype)
    expected = torch.empty(length, dtype=dtype)
    reduce_into(expected, [values.clone() for values in given_values], reduction)
    kept = [values.clone() for values in given_values]
    results = given_values if in_place else [torch.empty_like(v) for v in given_values]
    ends = connected(size)

    run(
        ends,
        lambda rank: ends[rank].all_reduce(results[rank], given_values[rank], reduction),
        Choices(seed),
    )

    for result in results:
        assert torch.equal(result, expected)
    for values, before in zip(given_values, kept, strict=True):
        assert in_place or torch.equal(values, before)


@settings(deadline=None)
@given(SIZES, st.lists(st.integers(0, 20), min_size=5, max_size=5), DTYPES, REDUCTIONS, SEEDS)
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_sum(
    size: int, sizes: list[int], dtype: torch.dtype, reduction: str, seed: int
) -> None:
    sizes = sizes[:size]
    given_values = values_of(size, sum(sizes), dtype)
    expected = torch.empty(sum(sizes), dtype=dtype)
    reduce_into(expected, [values.clone() for values in given_values], reduction)
    kept = [values.clone() for values in given_values]
    results = [torch.empty(length, dtype=dtype) for length in sizes]
    ends = connected(size)

    def start(rank: int) -> Any:
        own = torch.split(given_values[rank], sizes)[rank]
        sent = chunks(given_values[rank], sizes, MPI)
        return ends[rank].reduce_scatter(results[rank], own, sent, reduction)

    run(ends, start, Choices(seed))

    assert torch.equal(torch.cat(results), expected)
    for values, before in zip(given_values, kept, strict=True):
        assert torch.equal(values, before)


@settings(deadline=None)
@given(SIZES, st.data(), SEEDS)
def test_an_exchange_brings_everybody_what_was_sent_to_it(
    size: int, data: st.DataObject, seed: int
) -> None:
    lengths = [[data.draw(st.integers(0, 20)) for _ in range(size)] for _ in range(size)]
    sent = [[torch.full((lengths[a][b],), 10.0 * a + b) for b in range(size)] for a in range(size)]
    received = [[torch.empty(lengths[a][b]) for a in range(size)] for b in range(size)]
    ends = connected(size)

    def start(rank: int) -> Any:
        rooms = [memory(values, MPI) for values in received[rank]]
        return ends[rank].exchange(rooms, [memory(values, MPI) for values in sent[rank]])

    run(ends, start, Choices(seed))

    for b in range(size):
        for a in range(size):
            assert torch.equal(received[b][a], sent[a][b])


def test_collectives_of_one_group_do_not_mix() -> None:
    ends, lengths = connected(3), (40, 7, 0, 33)
    results = [[torch.ones(length) for length in lengths] for _ in range(3)]

    def several(rank: int) -> Iterator[Any]:
        for values in results[rank]:
            yield from ends[rank].all_reduce(values, values, "sum")

    run(ends, several, Choices(7))

    for rank in range(3):
        for values in results[rank]:
            assert torch.equal(values, torch.full_like(values, 3.0))


@pytest.mark.slow
def test_the_memory_for_what_comes_in_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_collectives, "_SCRATCH_BYTES", 256)
    ends, held = connected(2), []

    for length in (10_000, 7, 1, 2, 3, 4, 5, 6, 7, 8):
        for dtype in (torch.float32, torch.float64):
            both = torch.ones(length, dtype=dtype), torch.ones(length, dtype=dtype)

            def start(rank: int, both: tuple[torch.Tensor, ...] = both) -> Iterator[Any]:
                return ends[rank].all_reduce(both[rank], both[rank], "sum")

            run(ends, start, Choices(0))
            free = [places for kept in ends[0]._kept.values() for places in kept]
            held.append(sum(place.nbytes for rows in free for row in rows for place, _ in row))
            assert held[-1] == ends[0]._kept_bytes

    assert 0 < max(held) <= 256


@settings(deadline=None)
@given(st.integers(0, 30), DTYPES, REDUCTIONS, st.booleans(), SEEDS)
def test_two_ranks_that_swap_all_they_have_get_the_sum_in_rank_order(
    length: int, dtype: torch.dtype, reduction: str, in_place: bool, seed: int
) -> None:
    given_values = values_of(2, length, dtype)
    expected = torch.empty(length, dtype=dtype)
    reduce_into(expected, [values.clone() for values in given_values], reduction)
    results = given_values if in_place else [torch.empty_like(v) for v in given_values]
    ends = connected(2)

    run(
        ends,
        lambda rank: ends[rank].swap_and_reduce(results[rank], given_values[rank], reduction),
        Choices(seed),
    )

    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.slow
@settings(deadline=None)
@given(SIZES, st.lists(LENGTHS, min_size=2, max_size=4), st.booleans(), SEEDS)
def test_several_that_are_under_way_at_once_do_not_meet(
    size: int, lengths: list[int], in_place: bool, seed: int
) -> None:
    """Each rank looks at its own in an order of its own, so that each is at another message."""
    network, choose = Network(size), Choices(seed)
    ends = [DirectCollectives(Comm(network, rank), MPI) for rank in range(size)]
    given_values = [values_of(size, length, torch.float32) for length in lengths]
    expected = [values[0].clone() for values in given_values]
    for out, values in zip(expected, given_values, strict=True):
        reduce_into(out, [part.clone() for part in values], "sum")
    results = [
        values if in_place else [torch.empty_like(part) for part in values]
        for values in given_values
    ]
    works = [
        MpiWork(
            request=ends[rank].all_reduce(results[number][rank], values[rank], "sum"), tensors=()
        )
        for number, values in enumerate(given_values)
        for rank in range(size)
    ]

    while not all(work.is_over for work in works):
        under_way = [work for work in works if not work.is_over]
        under_way[choose(len(under_way))].look()
        if network.matched:
            network.deliver(choose(len(network.matched)))

    for number, wanted in enumerate(expected):
        for result in results[number]:
            assert torch.equal(result, wanted)
