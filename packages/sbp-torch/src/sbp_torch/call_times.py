"""Measure the times of operator calls, for calibration, while all other ranks make the same calls.

Each round makes the calls in shuffled order, which resembles a step: the inputs of a call were just
written, and other code ran in between. All ranks make the same calls in the same order, and begin
each together, so that they share memory and caches as in training. The time of a round is that of
the slowest rank, because the other ranks wait for it. The result is the median over the rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from sbp_core.compile.rank_calls import RankCall
from sbp_core.graph import TensorType
from sbp_core.operators import MeasuredOperator
from sbp_torch.segments import segment_function

__all__ = ["CallTimer", "TimedCalls"]

#: The least and the greatest number of rounds that count. One that does not count comes first.
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 15

#: Calls in a row, whose mean counts. The wait for the other ranks has cooled the processor before
#: the first call; the next call finds its own code warm. A call of a step is between the two.
_IN_A_ROW = 2

#: Once a block of this size, in bytes, has been freed, glibc keeps and reuses blocks up to it; see
#: "M_MMAP_THRESHOLD" in mallopt(3).
_LARGEST_KEPT = 2**25 - 2**16

#: Number of random elements from which made-up data is copied.
_POOL = 1 << 16

#: Calls between two readings of the clock, on which all ranks have to agree.
_BETWEEN_LOOKS = 16

#: The share of the time that the round that does not count may take: later rounds are no slower.
_FIRST_SHARE = 0.4

#: Reports progress: what is being done, how many are done, how many there are, the seconds left.
Tell = Callable[[str, int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCalls:
    """The measured times.

    Args:
        operators: The calls with their times.
        rounds: Number of rounds that count.
        failed: Calls that cannot be made with made-up data, each with PyTorch's message.
        left_out: Number of calls for which time or memory was short.
    """

    operators: tuple[MeasuredOperator, ...]
    rounds: int
    failed: tuple[tuple[str, str], ...]
    left_out: int


@dataclass(kw_only=True)
class CallTimer:
    """Times calls on one rank.

    Args:
        device: The device of the calls.
        ready: A barrier: returns on all ranks at the same time.
        slowest: Returns the largest of each value over all ranks.
        time_s: Seconds that all calls together may take.
        max_bytes: Most bytes of the tensors of one call.
        tell: Is called with the progress.
    """

    device: torch.device
    ready: Callable[[], None]
    slowest: Callable[[Sequence[float]], list[float]]
    time_s: float
    max_bytes: float
    tell: Tell = lambda what, done, of, left_s: None
    _pools: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def run(self, calls: Iterable[RankCall]) -> TimedCalls:
        """Time calls in the order of the list; if the time is short, only the first ones.

        Every rank has to call this, with the same list.
        """
        if self.device.type == "cpu":
            # In a step, activations hold the memory, so no call is the first to touch it.
            torch.empty(_LARGEST_KEPT, dtype=torch.uint8)
        given, began_s = list(calls), time.monotonic()
        tried, failed = self._try_calls(given, began_s)
        times_s, rounds = self._rounds(tried, began_s)
        return TimedCalls(
            operators=tuple(
                MeasuredOperator(
                    call=one.call.call,
                    dtype=one.call.dtype,
                    flop=one.call.flop,
                    num_bytes=one.call.num_bytes,
                    time_s=time_s,
                )
                for one, time_s in zip(tried, times_s, strict=True)
            ),
            rounds=rounds,
            failed=tuple(failed),
            left_out=len(given) - len(tried) - len(failed),
        )

    def _try_calls(
        self, calls: Sequence[RankCall], began_s: float
    ) -> tuple[list[_Timed], list[tuple[str, str]]]:
        """Make each call once; return the calls that succeed, and the failed ones with reasons."""
        made: list[_Timed] = []
        failed: list[tuple[str, str]] = []
        for index, call in enumerate(calls):
            if index % _BETWEEN_LOOKS == 0:
                (spent_s,) = self.slowest([time.monotonic() - began_s])
                if spent_s > _FIRST_SHARE * self.time_s:
                    break
                self.tell("making each call once", index, len(calls), self.time_s - spent_s)
            if call.num_bytes > self.max_bytes:
                continue
            error = ""
            try:
                timed = _Timed(call, self._bounds(call))
                timed.time_s(self._inputs(timed), self.device)
            except Exception as problem:  # kernels raise any error for data that does not fit
                error = str(problem).partition("\n")[0] or type(problem).__name__
            (is_bad,) = self.slowest([float(bool(error))])
            if is_bad:
                failed.append((call.call, error or "another rank cannot make it"))
            else:
                made.append(timed)
        return made, failed

    def _rounds(self, tried: Sequence[_Timed], began_s: float) -> tuple[list[float], int]:
        """Return the time of each call in seconds, and the number of rounds."""
        times_s: list[list[float]] = [[] for _ in tried]
        order = list(range(len(tried)))
        draw, rounds = random.Random(0), 0
        round_s = 0.0
        while rounds < _MOST_ROUNDS:
            (spent_s,) = self.slowest([time.monotonic() - began_s])
            left_s = self.time_s - spent_s
            if rounds >= _FEWEST_ROUNDS and left_s < round_s:
                break
            self.tell("timing rounds of calls", rounds, _MOST_ROUNDS, left_s)
            start_s = time.monotonic()
            draw.shuffle(order)
            took_s = [0.0] * len(tried)
            for at in order:
                inputs = [self._inputs(tried[at]) for _ in range(_IN_A_ROW)]
                self.ready()
                took_s[at] = mean(tried[at].time_s(of, self.device) for of in inputs)
            for of, time_s in zip(times_s, self.slowest(took_s), strict=True):
                of.append(time_s)
            (round_s,) = self.slowest([time.monotonic() - start_s])
            rounds += 1
        return list(map(median, times_s)), rounds

    def _bounds(self, call: RankCall) -> int:
        """Return an upper bound of the values of integer inputs, which may be indices.

        An index points into a dim of one of the other tensors, but the call does not say which dim.
        The bound is the largest size of a dim that the kernel accepts. It is searched on the CPU,
        where a wrong index only raises an error.
        """
        if not any(_is_integer(entry) for entry in call.inputs):
            return 1
        host, segment = torch.device("cpu"), segment_function(call.segment, 0, ())
        sizes = {size for entry in call.inputs if not _is_integer(entry) for size in entry.shape}
        for bound in sorted({*sizes, 1}, reverse=True):
            values = _values(call, bound, host, self._pool)
            for entry, value in zip(call.inputs, values, strict=False):
                if _is_integer(entry):
                    value.fill_(bound - 1)  # drawn numbers might all be small
            try:
                segment(*values)
            except Exception:
                if bound <= 1:
                    raise
                continue
            return bound
        return 1

    def _inputs(self, timed: _Timed) -> list[Any]:
        return _values(timed.call, timed.bound, self.device, self._pool)

    def _pool(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return made-up data of a dtype, from 0.5 to 1: values that make no kernel slow."""
        if dtype not in self._pools:
            drawn = torch.rand(_POOL, generator=torch.Generator().manual_seed(0)) / 2 + 0.5
            self._pools[dtype] = drawn.to(dtype)
        return self._pools[dtype].to(device)


class _Timed:
    """A call, and the segment function that a step would run for it."""

    def __init__(self, call: RankCall, bound: int) -> None:
        self.call, self.bound = call, bound
        self._segment = segment_function(call.segment, 0, (), owns=True)

    def time_s(self, inputs: list[Any], device: torch.device) -> float:
        """Return the seconds of one call, which include freeing its results."""
        wait: Callable[[], object] = lambda: None  # noqa: E731
        if device.type == "cuda":
            wait = partial(torch.cuda.synchronize, device)
        wait()
        began = time.perf_counter()
        self._segment(inputs)  # owns them, and empties the list
        wait()
        return time.perf_counter() - began


def _is_integer(entry: TensorType) -> bool:
    return entry.dtype.startswith(("int", "uint"))


def _values(
    call: RankCall,
    bound: int,
    device: torch.device,
    pool: Callable[[torch.dtype, torch.device], torch.Tensor],
) -> list[Any]:
    """Return the arguments of a call: tensors just written, and 1 for host numbers."""
    found: list[Any] = []
    for entry in call.inputs:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if _is_integer(entry):
            found.append(torch.randint(bound, entry.shape, dtype=dtype, device=device))
        elif dtype == torch.bool:
            found.append(torch.randint(2, entry.shape, device=device).to(dtype))
        else:
            made, source = torch.empty(entry.shape, dtype=dtype, device=device), pool(dtype, device)
            flat, size = made.view(-1), source.numel()
            whole = flat.numel() // size * size  # it repeats the data of the pool
            if whole:
                flat[:whole].view(-1, size).copy_(source)
            flat[whole:].copy_(source[: flat.numel() - whole])
            found.append(made)
    found += [1.0] * (len(call.segment.inputs) - len(found))
    return found
