"""Measure on every rank: rates of computing and copying, launch time of operators, times of calls.

Calls of a communicator (collectives and transfers) are repeated in rounds, each in another order,
so that a temporary slowdown of the machine does not distort the curve of one size. Before a call,
all ranks agree on a start time and spin until then. The time of a call is from the start on the
last rank to the end on the last rank, by the clock that all processes of a machine share. All ranks
make the same calls in the same order, and agree on what they leave out.

`measure_busy` measures for which part of an asynchronous call a rank cannot compute:

    call         | ------- call ------- |
    compute      | ---------------- products ---------------- |
    both         | begin | products ..., progress between them, wait ... |

    busy = (both - compute) / call

The result is 0 if another processor moves the data, and 1 if the rank itself, or a thread that
shares its core, does all of the work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from statistics import median

import torch

from sbp_core.boxing import BoxingStep, Communicator, StepKind, route
from sbp_core.calibration import MeasuredCase, Measurement
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, local_shape
from sbp_core.units import format_bytes
from sbp_launch.calibrate.calls import CalibrationCall, calls_of, cases_of, make_call
from sbp_launch.calibrate.job import CalibrationJob, Progress, Rates

#: Dtypes whose matrix multiplications are timed; float16 on GPUs only.
_DTYPES = ("float32", "float64", "bfloat16")
_GPU_DTYPES = (*_DTYPES, "float16")

#: Least seconds of one multiplication or copy, so that clock and caches matter little; and most
#: seconds of all repetitions, if there is enough time.
_AT_LEAST_S, _AT_MOST_S = 0.02, 1.0

_LARGEST_SIDE = 16_384
_COPY_BYTES = 64 * 2**20
_LAUNCHES = 2_000
_RATE_REPETITIONS = 7


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_rates(
    device: torch.device, ready: Callable[[], None], at_most_s: float = _AT_MOST_S
) -> Rates:
    """Measure the rates of one rank.

    Args:
        device: The device to compute with.
        ready: Barrier of all ranks; called before each measurement.
        at_most_s: Seconds for the repetitions of each measurement; at least three are made.
    """

    def median_s(work: Callable[[], object]) -> float:
        """Return the median time of a function that was called once before."""
        times: list[float] = []
        while len(times) < _RATE_REPETITIONS and (len(times) < 3 or sum(times) < at_most_s):
            times.append(_once_s(device, work))
        return median(times)

    rates: dict[str, float] = {}
    for name in _GPU_DTYPES if device.type == "cuda" else _DTYPES:
        ready()
        side, time_s = 128, 0.0
        while time_s < _AT_LEAST_S and side < _LARGEST_SIDE:
            side *= 2
            dtype = getattr(torch, name)
            a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
            torch.mm(a, b)
            time_s = _once_s(device, partial(torch.mm, a, b))
        rates[name] = 2 * side**3 / median_s(partial(torch.mm, a, b))
    ready()
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.zeros_like(source).fill_(2)
    copy_rate = 2 * _COPY_BYTES / median_s(lambda: target.copy_(source))
    ready()
    one, other = torch.ones(8, device=device), torch.ones(8, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(one, other)

    launch_s = median_s(launch) / _LAUNCHES
    return Rates(flop_per_s=rates, memory_bytes_per_s=copy_rate, launch_s=launch_s)


def _once_s(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


#: Seconds allowed for the first call of each kind, which connects the ranks.
_CONNECT_S = 300.0

#: Seconds that a round spends on repetitions of a short call, and their largest number.
_SHORT_S, _MOST_AT_ONCE = 0.05, 15

#: Seconds between the agreement on a start time and that time; longer than a thread's wake-up.
_HEAD_START_S = 3e-4

#: Large sizes are left out until there is time for at least this many rounds.
_FEWEST_ROUNDS = 3

#: Seconds between two lines of progress.
_REPORT_INTERVAL_S = 0.25


class Stopwatch:
    """Times calls on one rank, and reduces times over all ranks.

    Args:
        communicator: The communicator of this rank.
        num_ranks: Number of ranks of the run.
        device: Device of the tensors.
        deadline_s: Seconds that a call may wait for other ranks.
    """

    def __init__(
        self, communicator: Communicator, num_ranks: int, device: torch.device, deadline_s: float
    ) -> None:
        self._communicator, self._device, self._deadline_s = communicator, device, deadline_s
        self._everyone = Placement.grid((num_ranks,))
        self._number = 0
        self._sent = torch.zeros(0, device=device)

    def barrier(self) -> None:
        """Wait for all ranks, and return on all of them at the same time."""
        (begin_s,) = self.slowest([time.perf_counter() + _HEAD_START_S])
        while time.perf_counter() < begin_s:
            time.sleep(0)  # yield to other threads and processes

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return for each value its maximum over all ranks."""
        if self._everyone.size == 1 or not values:
            return list(values)
        given = torch.tensor(values, dtype=torch.float64, device=self._device)
        largest_of = (self._everyone, NdSbp.parse("P(max)")), (self._everyone, NdSbp.parse("B"))
        step = route((len(values),), "float64", *largest_of).steps[0]
        result = self._run(step, given, _CONNECT_S)
        assert result is not None, "every rank has a part in what all agree on"
        largest: list[float] = result.tolist()
        return largest

    def time(
        self, step: BoxingStep, shard: torch.Tensor | None, *, first: bool = False
    ) -> tuple[float, float]:
        """Return start and end of one call on this rank, in seconds of the machine's clock.

        A rank without a part in the call returns 0 and 0.
        """
        self.barrier()
        start_s = time.perf_counter()
        # The result lives until the clock was read: freeing it is not part of the call.
        result = self.call(step, shard, first=first)
        end_s = time.perf_counter()
        return (start_s, end_s) if result is not None else (0.0, 0.0)

    def call(
        self, step: BoxingStep, shard: torch.Tensor | None, *, first: bool = False
    ) -> torch.Tensor | None:
        """Make one call, and wait for the device; None on a rank without a part in the call."""
        result = self._run(step, shard, _CONNECT_S if first else self._deadline_s)
        synchronize(self._device)
        return result

    def durations(self, spans_s: Sequence[tuple[float, float]]) -> list[float]:
        """Return for each call the seconds from the last rank's start to the last rank's end."""
        starts_s = self.slowest([start_s for start_s, _ in spans_s])
        ends_s = self.slowest([end_s for _, end_s in spans_s])
        return [end_s - start_s for start_s, end_s in zip(starts_s, ends_s, strict=True)]

    def _run(
        self, step: BoxingStep, shard: torch.Tensor | None, deadline_s: float
    ) -> torch.Tensor | None:
        rank, communicator = self._communicator.rank, self._communicator
        self._number += 1
        tag, result = f"calibrate-{self._number}", None
        if step.kind is not StepKind.TRANSFER:
            if rank in step.source[0]:
                assert shard is not None, "a rank that holds a part has a shard"
                result = communicator.collective(step, shard, tag=tag, deadline_s=deadline_s)
            return result
        if rank in step.source[0]:
            assert shard is not None, "a rank that holds a part has a shard"
            communicator.send(step, shard, tag=tag, deadline_s=deadline_s)
            result = self._sent
        if rank in step.target[0]:
            result = communicator.receive(step, shard, tag=tag, deadline_s=deadline_s)
        return result


class CalibrationShards:
    """The input shards of a rank: views of one block of memory whose pages are mapped already.

    Args:
        rank: The rank.
        device: Device of the shards.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._block = torch.ones(0, device=device)

    def of(self, step: BoxingStep) -> torch.Tensor | None:
        """Return the rank's shard for a step, float32, contiguous; None if the rank has none."""
        mesh, sbp = step.source
        if self._rank not in mesh:
            return None
        shape = local_shape(step.shape, sbp, mesh.mesh_shape, mesh.coordinate(self._rank))
        if prod(shape) > self._block.numel():
            self._block = torch.ones(prod(shape), device=self._device)
        return self._block[: prod(shape)].view(shape)


class RankMeasurer:
    """Measures the calls of one job on one rank.

    Args:
        job: The job.
        watch: The stopwatch of this rank.
        rank: The rank.
        report: Called with the progress, on every rank.
        time_s: Seconds that it may take, the same on every rank.
    """

    def __init__(
        self,
        job: CalibrationJob,
        watch: Stopwatch,
        rank: int,
        report: Callable[[Progress], None],
        time_s: float,
    ) -> None:
        self._job, self._watch, self._report, self._time_s = job, watch, report, time_s
        self._shards = CalibrationShards(rank, torch.device(job.device))
        self._calls: list[CalibrationCall] = []
        self._first_s: list[float] = []
        self._times_s: list[list[float]] = []
        self._reported_s = self._began = self._round_s = self._barrier_s = 0.0
        self._least_left_s = inf
        self.rounds = 0
        self.skipped = ""

    def run(self) -> tuple[Measurement, ...]:
        """Measure; return one sample for each call, equal on every rank."""
        self._began = time.monotonic()
        self._warm_up()
        self._times_s = [[] for _ in self._calls]
        while self._calls and self.rounds < self._job.settings.repetitions:
            started = time.monotonic()
            self._round()
            self.rounds += 1
            now = time.monotonic()
            spent_s, self._round_s = self._watch.slowest([now - self._began, now - started])
            if spent_s + self._round_s > self._time_s:
                break
        backend = self._job.boxing.name
        return tuple(
            Measurement(
                backend=backend,
                kind=call.case.kind,
                group_size=call.case.group_size,
                concurrent_groups=call.case.concurrent_groups,
                shared_bytes=call.shared_bytes,
                times_s=tuple(times),
            )
            for call, times in zip(self._calls, self._times_s, strict=True)
        )

    def _warm_up(self) -> None:
        """Make every call once, from small to large; stop at sizes without enough time or memory.

        A size is tried only if `_FEWEST_ROUNDS` rounds of all smaller sizes and of this one are
        expected to end in time; calls of the next size are expected to take twice as long.
        """
        settings = self._job.settings
        fewest = min(_FEWEST_ROUNDS, settings.repetitions)
        self._watch.barrier()
        began = time.monotonic()
        self._watch.barrier()
        (self._barrier_s,) = self._watch.slowest([time.monotonic() - began])
        for number, level in enumerate(calls_of(settings)):
            size = settings.chosen_sizes[number]
            if size > self._job.max_call_bytes:
                self.skipped = f"{format_bytes(size)} and more: there is not enough memory"
                return
            self._report_progress("warming up", number, len(settings.chosen_sizes))
            spans_s = [
                self._watch.time(call.step, self._shards.of(call.step), first=True)
                for call in level
            ]
            took_s = self._watch.durations(spans_s)
            self._calls += level
            self._first_s += took_s
            (spent_s,) = self._watch.slowest([time.monotonic() - self._began])
            next_s = [2 * call_s for call_s in took_s]
            round_s = self._expected_round_s([*self._first_s, *next_s])
            expected_s = spent_s + sum(next_s) + fewest * round_s
            if expected_s > self._time_s and number + 1 < len(settings.chosen_sizes):
                next_size = format_bytes(settings.chosen_sizes[number + 1])
                self.skipped = (
                    f"{next_size} and more: they take longer than time_s={settings.time_s:g}"
                )
                return

    def _round(self) -> None:
        """Repeat every call, in a random order."""
        repeats = [self._repeats(first_s) for first_s in self._first_s]
        order = [index for index, times in enumerate(repeats) for _ in range(times)]
        random.Random(self.rounds).shuffle(order)
        if not self.rounds:
            self._round_s = self._expected_round_s(self._first_s)
        spans_s: list[tuple[float, float]] = []
        for done, index in enumerate(order):
            what = f"round {self.rounds + 1} of {self._job.settings.repetitions}"
            left_s = self._time_s - (time.monotonic() - self._began)
            rounds = self._job.settings.repetitions - self.rounds - done / len(order)
            left_s = max(0.0, min(rounds * self._round_s, left_s))
            self._least_left_s = min(self._least_left_s, left_s)  # it never grows
            self._report_progress(what, done, len(order), left_s=self._least_left_s)
            step = self._calls[index].step
            # First once without timing: a timed call then finds caches and memory as a call of the
            # same size leaves them, as in training steps, and not as some other call does.
            self._watch.call(step, self._shards.of(step))
            spans_s.append(self._watch.time(step, self._shards.of(step)))
        for index, time_s in zip(order, self._watch.durations(spans_s), strict=True):
            self._times_s[index].append(time_s)

    def _repeats(self, first_s: float) -> int:
        """Return how often a round repeats a call whose first run took `first_s` seconds.

        All short calls together take at most half of the time.
        """
        settings = self._job.settings
        count = len(settings.chosen_sizes) * len(cases_of(settings))
        short_s = min(_SHORT_S, self._time_s / (4 * _FEWEST_ROUNDS * count))
        return max(1, min(_MOST_AT_ONCE, int(short_s / max(first_s, 1e-9))))

    def _expected_round_s(self, first_s: Sequence[float]) -> float:
        """Return the seconds of a round, given the seconds of each call; it makes each twice."""
        return sum((2 * call_s + self._barrier_s) * self._repeats(call_s) for call_s in first_s)

    def _report_progress(self, what: str, done: int, of: int, left_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_INTERVAL_S or not done:
            self._reported_s = now
            self._report(Progress(what=what, done=done, of=of, left_s=left_s))


#: Bytes of the all-reduce.
_CALL_BYTES = 4 * 2**20

#: Side of the matrices that are multiplied meanwhile: a product takes about a millisecond.
_SIDE = 384

_BUSY_WARM_UP, _BUSY_REPETITIONS, _DEADLINE_S = 2, 24, 60.0

#: Time of all products, as a multiple of the time of the call.
_LONGER = 2.0


def measure_busy(communicator: Communicator, watch: Stopwatch, num_ranks: int) -> float:
    """Return the part of a call in which its rank cannot compute, in [0, 1]; equal on all ranks."""
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
    """Return the first quartile of each function's times, run alternately, on the slowest rank."""
    times_s: list[float] = []
    for _ in range(_BUSY_WARM_UP + _BUSY_REPETITIONS):
        for work in works:
            watch.barrier()
            began = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - began)
    number = len(works)
    slowest_s = watch.slowest(times_s[_BUSY_WARM_UP * number :])
    by_work = [sorted(slowest_s[at::number]) for at in range(number)]
    return [of[(len(of) - 1) // 4] for of in by_work]
