"""How much of a call a rank cannot compute in, though it has begun the call and goes on.

    call         | ------- call ------- |
    compute      | ---------------- products ---------------- |
    both         | begin | products ..., progress between them, wait ... |

What both take beyond the products, over what the call takes alone, is the part that overlap does
not hide: 0 where another processor moves the data, 1 where all of it is done by the rank itself, or
by a thread that shares its core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sbp_core.boxing import Communicator
from sbp_core.calibration import MeasuredCase
from sbp_launch.calibrate.calls import make_call
from sbp_launch.calibrate.collectives import Stopwatch

#: Of the call, an all-reduce.
_CALL_BYTES = 4 * 2**20

#: Of the matrices that are multiplied while it is under way: a product takes about a millisecond.
_SIDE = 384

_WARM_UP, _REPETITIONS, _DEADLINE_S = 2, 24, 60.0

#: So many times as long as the call the products take.
_LONGER = 2.0


def measure_busy(communicator: Communicator, watch: Stopwatch, num_ranks: int) -> float:
    """Return the part of a call in which its rank cannot compute, in [0, 1]; equal on all ranks.

    Args:
        communicator: Of this rank.
        watch: Of this rank.
        num_ranks: Of the run, all of which call this.
    """
    case = MeasuredCase(kind="all-reduce", group_size=num_ranks)
    step = make_call(case, _CALL_BYTES, num_ranks).step
    shard, a, b = torch.ones(step.shape), torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    number = 0

    def tag() -> str:
        nonlocal number
        number += 1
        return f"calibrate-busy-{number}"

    def call() -> None:
        communicator.collective(step, shard, tag=tag(), deadline_s=_DEADLINE_S)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)
            communicator.progress()

    def both(count: int) -> None:
        begun = communicator.begin(step, shard, tag=tag(), deadline_s=_DEADLINE_S)
        compute(count)
        begun.wait()

    (product_s,) = _times_s(watch, [lambda: compute(1)])
    (call_s,) = _times_s(watch, [call])
    count = max(1, round(_LONGER * call_s / product_s))
    works = [call, lambda: compute(count), lambda: both(count)]
    call_s, compute_s, both_s = _times_s(watch, works)
    return min(1.0, max(0.0, (both_s - compute_s) / call_s))


def _times_s(watch: Stopwatch, works: Sequence[Callable[[], None]]) -> list[float]:
    """Return the first quartile of the times of each work, in turns, on the slowest rank."""
    times_s: list[float] = []
    for _ in range(_WARM_UP + _REPETITIONS):
        for work in works:
            watch.barrier()
            began = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - began)
    number = len(works)
    slowest_s = watch.slowest(times_s[_WARM_UP * number :])
    by_work = [sorted(slowest_s[at::number]) for at in range(number)]
    return [of[(len(of) - 1) // 4] for of in by_work]
