from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sbp_core.runtime import MemorySample, Span, SpanKind, Trace
from sbp_launch.tracing.tracer import (
    ProcessTrace,
    gather_parts,
    own_part,
    pack,
    unpack,
    with_one_clock,
)
from sbp_torch.boxing.local import LocalBackend


def part(rank: int, *, host: str = "one", ahead_ns: int = 0, jitter_ns: int = 0) -> ProcessTrace:
    """Return the part of a rank whose clock is ahead."""
    begin = 1_000_000 + ahead_ns
    span = Span(
        SpanKind.BLOCKED, rank, "compute", 4, "forward.0", 1, begin, begin + 500, "data … of rank 1"
    )
    return ProcessTrace(
        ranks=(rank,),
        host=host,
        process=100 + rank,
        spans=(span,),
        held=(MemorySample(rank, begin, 64),),
        exits_ns=tuple(ahead_ns + 1000 * n + jitter_ns * (n % 3) for n in range(9)),
    )


def test_a_part_comes_out_of_its_text_as_it_went_in() -> None:
    assert unpack(pack(part(3))) == part(3)


def test_the_parts_of_all_ranks_reach_each_of_them() -> None:
    backend = LocalBackend()
    backend.open([0, 1])

    def gather(rank: int) -> list[ProcessTrace]:
        trace = Trace()
        for number in range(50 * rank + 1):  # of different lengths
            trace.note(replace(part(rank).spans[0], step=number))
        return gather_parts(backend, [0, 1], own_part(trace, [rank]))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(gather, [0, 1])
    backend.close()

    assert first == second
    assert [one.ranks for one in first] == [(0,), (1,)]
    assert [len(one.spans) for one in first] == [1, 51]
    assert all(len(one.exits_ns) == 9 for one in first)


def test_on_one_host_there_is_one_clock() -> None:
    parts = [part(0), part(1, ahead_ns=77, jitter_ns=50)]

    assert with_one_clock(parts) == (parts, 0.0)


def test_clocks_of_other_hosts_are_set_by_that_of_the_first() -> None:
    first, other = part(0), part(1, host="two", ahead_ns=5_000_000, jitter_ns=200)

    (same, moved), error_s = with_one_clock([first, other])

    assert same == first
    assert abs(moved.spans[0].begin_ns - 1_000_000) <= 200
    assert moved.spans[0].end_ns - moved.spans[0].begin_ns == 500
    assert moved.held[0].time_ns == moved.spans[0].begin_ns
    assert error_s == pytest.approx(200e-9)
