"""Time the collectives of the `local` backend that must copy, against memcpy, interleaved.

`nox -s benchmarks` or `python integration/benchmarks/local_time.py [ROUNDS]`, with ROUNDS for the
smallest size, and fewer for larger ones. Ranks are threads.
Memcpy is `torch.Tensor.copy_` of as many bytes into allocated memory, like the backend's results:
by one thread, or by one thread per rank on separate parts, which is the limit of the memory. The
time of a collective is from the call of the last rank until all ranks have returned. Its bytes are
those that it has to read and write: each shard is read once, and each result is written once, even
if all ranks share it. The ratio is the rate of the collective to that of memcpy, each for its best
round, because other load of the machine only adds time. Nothing is asserted: machines differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from threading import Barrier

import torch

from sbp_core.boxing import BoxingStep, StepKind, bounds_of, route, volume
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_core.units import format_bytes, format_seconds
from sbp_torch.boxing import LocalBackend, shard

MEBIBYTE = 2**20
ROWS = 1024

#: Number of rounds that do not count.
WARM_UP = 3
CHANGES: tuple[tuple[str, Sbp, Sbp], ...] = (
    ("all-reduce", P, B),
    ("reduce-scatter", P, S(0)),
    ("all-gather", S(0), B),
    ("all-gather of columns", S(1), B),
    ("all-to-all", S(0), S(1)),
)

#: The timed work of one rank, which begins after a barrier.
Work = Callable[[int], object]


def make_step(size_bytes: int, num_ranks: int, before: Sbp, after: Sbp) -> BoxingStep:
    """Return the collective on a float32 tensor of a size in bytes."""
    mesh, shape = Placement.grid((num_ranks,), ("x",)), (ROWS, size_bytes // 4 // ROWS)
    (step,) = route(shape, "float32", (mesh, NdSbp(before)), (mesh, NdSbp(after))).steps
    return step


def touched_bytes(step: BoxingStep) -> int:
    """Return the bytes that a collective among threads must read and write."""
    read = sum(map(volume, bounds_of(step.shape, *step.source).values()))
    shared = step.kind in (StepKind.ALL_REDUCE, StepKind.ALL_GATHER)
    written = prod(step.shape) * (1 if shared else step.source[0].size)
    if step.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_TO_ALL):
        written = prod(step.shape)
    return 4 * (read + written)


def collective(step: BoxingStep, donate: bool, ends: list[LocalBackend], number: list[int]) -> Work:
    """Return the work of one call of a collective on each rank; results are dropped at once."""
    parts = {
        rank: part.clone()
        for rank, part in shard(torch.randn(step.shape), step.source[0], step.source[1]).items()
    }

    def work(rank: int) -> None:
        ends[0].communicator(rank).collective(
            step, parts[rank], tag=f"call {number[0]}", deadline_s=60.0, donate=donate
        )

    return work


def memcpy(size_bytes: int, num_threads: int) -> Work:
    """Return the work of reading and writing `size_bytes` in total, on the first ranks."""
    given = [torch.randn(size_bytes // 8 // num_threads) for _ in range(num_threads)]
    taken = [torch.randn(size_bytes // 8 // num_threads) for _ in range(num_threads)]

    def work(rank: int) -> None:
        taken[rank].copy_(given[rank])

    return work


def timed(threads: ThreadPoolExecutor, num_ranks: int, work: Work, *, meets: bool) -> float:
    """Return seconds until the last rank ends, since the last start if `meets`, else the first."""
    barrier = Barrier(num_ranks)

    def run(rank: int) -> tuple[float, float]:
        barrier.wait()
        start = time.perf_counter()
        work(rank)
        return start, time.perf_counter()

    spans = [future.result() for future in [threads.submit(run, r) for r in range(num_ranks)]]
    starts = [start for start, _ in spans]
    return max(stop for _, stop in spans) - (max(starts) if meets else min(starts))


def compare(name: str, step: BoxingStep, donate: bool, rounds: int) -> None:
    """Time one collective against memcpy, and print a line."""
    num_ranks, size_bytes = step.source[0].size, touched_bytes(step)
    backend, number = LocalBackend(), [0]
    backend.open(range(num_ranks))
    ways = {
        "collective": collective(step, donate, [backend], number),
        "one": memcpy(size_bytes, 1),
        "all": memcpy(size_bytes, num_ranks),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    with ThreadPoolExecutor(num_ranks) as threads:
        for turn in range(rounds + WARM_UP):
            for way, work in ways.items():
                number[0] += 1
                num_threads = 1 if way == "one" else num_ranks
                took_s = timed(threads, num_threads, work, meets=way == "collective")
                if turn >= WARM_UP:
                    times[way].append(took_s)
    backend.close()
    took_s = {way: min(seen) for way, seen in times.items()}
    ratio = {way: took_s[way] / took_s["collective"] for way in ("one", "all")}
    print(
        f"{name:<24} {num_ranks} ranks {format_bytes(4 * prod(step.shape)):>9}"
        f"{' donated' if donate else '':<8} {format_seconds(took_s['collective']):>9}"
        f"  of memcpy: one thread {ratio['one']:.2f}, all {ratio['all']:.2f}",
        flush=True,
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    torch.set_num_threads(1)
    for num_ranks in (2, 4):
        for mebibytes in (1, 16, 64):
            run = partial(compare, rounds=max(5, 4 * rounds // (4 + mebibytes)))
            for name, before, after in CHANGES:
                step = make_step(mebibytes * MEBIBYTE, num_ranks, before, after)
                for donate in (False, True) if step.kind is StepKind.ALL_REDUCE else (False,):
                    run(name, step, donate)


if __name__ == "__main__":
    main()
