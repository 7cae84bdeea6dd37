"""One process of a calibration: open the backend, and measure on each of its ranks in a thread.

`calibrate.__main__` calls `run_job`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from sbp_core.boxing import BoxingBackend
from sbp_core.compile.rank_calls import RankCalls
from sbp_core.plugins import discover
from sbp_core.runtime import Runtime
from sbp_launch.calibrate.job import CalibrationJob, CalibrationResult, CallTimes, Progress, Rates
from sbp_launch.calibrate.launch_overhead import SmallModel, measure_large, measure_steps
from sbp_launch.calibrate.measuring import RankMeasurer, Stopwatch, measure_busy, measure_rates
from sbp_torch.call_times import CallTimer

#: Fraction of the time for each rate of computing and copying (1/60); there are five or six rates.
_RATES_SHARE = 60.0


def run_job(folder: Path) -> None:
    """Run the job in a folder; the process of rank 0 saves the results there."""
    job = CalibrationJob.load(folder)
    ranks = range(job.settings.ranks)
    backend = cast(BoxingBackend, discover().make("boxing", job.boxing.name, job.boxing.settings))
    runtime = None
    # Sessions do not run on GPUs yet: there, launch times are those of a loop.
    if job.device == "cpu" and not job.calls:
        runtime = cast(Runtime, discover().make("runtime", job.runtime.name, job.runtime.settings))
    errors: list[Exception] = []
    found: dict[int, CalibrationResult | CallTimes] = {}

    def work(rank: int) -> None:
        try:
            if torch.device(job.device).type == "cuda":
                torch.cuda.set_device(job.device)  # each thread has its own
            found[rank] = (time_calls if job.calls else measure)(job, backend, rank)
        except Exception as error:
            errors.append(error)
            backend.fail(error)

    try:
        backend.open(ranks)
        job = replace(job, device=str(indexed_device(job.device)))
        threads = [threading.Thread(target=work, args=(rank,)) for rank in backend.local_ranks()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        step_s: Mapping[str, float] = {}
        large_s: Mapping[int, tuple[float, ...]] = {}
        if runtime is not None:
            if 0 in found:
                _print(Progress(what="training a small model"))
            size = SmallModel.within(job.settings.time_s)
            step_s = measure_steps(backend, runtime, job.settings.ranks, size)
            if job.settings.ranks > 1 and size == SmallModel():
                large_s = measure_large(backend, runtime, job.settings.ranks)
    except BaseException as error:
        backend.fail(error)
        raise
    finally:
        backend.close()
    if 0 in found:
        first = found[0]
        if isinstance(first, CalibrationResult):
            first = replace(first, step_s=step_s, large_s=large_s)
        first.save(folder)


def indexed_device(device: str) -> torch.device:
    """Return a device with its index: the GPU that an open backend has chosen for this process."""
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def measure(job: CalibrationJob, backend: BoxingBackend, rank: int) -> CalibrationResult:
    """Measure on one rank, together with all other ranks; return the results."""
    device, settings = torch.device(job.device), job.settings
    watch = Stopwatch(backend.communicator(rank), settings.ranks, device, settings.deadline_s)

    def report(progress: Progress) -> None:
        if rank == 0:
            _print(progress)

    report(Progress(what="connecting the ranks"))
    watch.barrier()
    report(Progress(what="computing and copying"))
    began = time.monotonic()
    at_most_s = min(1.0, settings.time_s / _RATES_SHARE)
    rates = measure_rates(device, watch.barrier, at_most_s)
    # Take the rates of the slowest rank.
    names = list(rates.flop_per_s)
    times_s = [1 / rates.flop_per_s[name] for name in names]
    *flop_s, byte_s, launch_s = watch.slowest(
        [*times_s, 1 / rates.memory_bytes_per_s, rates.launch_s]
    )
    rates = Rates(
        flop_per_s={name: 1 / time_s for name, time_s in zip(names, flop_s, strict=True)},
        memory_bytes_per_s=1 / byte_s,
        launch_s=launch_s,
    )
    (spent_s,) = watch.slowest([time.monotonic() - began])
    # Never 0: the smallest calls are measured even if measuring the rates took long.
    time_s = max(settings.time_s / 2, settings.time_s - spent_s)
    measurer = RankMeasurer(job, watch, rank, report, time_s)
    samples = measurer.run()
    busy = None
    if settings.ranks > 1 and device.type == "cpu":
        busy = measure_busy(backend.communicator(rank), watch, settings.ranks)
    return CalibrationResult(
        samples=samples,
        busy=busy,
        measured_s=time.monotonic() - began,
        rates=rates,
        rounds=measurer.rounds,
        skipped=measurer.skipped,
        library=torch.__version__,
    )


def time_calls(job: CalibrationJob, backend: BoxingBackend, rank: int) -> CallTimes:
    """Time the calls of a list on one rank, together with all other ranks; return the results."""
    device, settings = torch.device(job.device), job.settings
    watch = Stopwatch(backend.communicator(rank), settings.ranks, device, settings.deadline_s)
    began = time.monotonic()

    def tell(what: str, done: int, of: int, left_s: float) -> None:
        if rank == 0:
            _print(Progress(what=what, done=done, of=of, left_s=max(0.0, left_s)))

    timer = CallTimer(
        device=device,
        ready=watch.barrier,
        slowest=watch.slowest,
        time_s=settings.time_s,
        max_bytes=job.max_call_bytes,
        tell=tell,
    )
    found = timer.run(RankCalls.load(Path(job.calls)).calls)
    return CallTimes(
        operators=found.operators,
        rounds=found.rounds,
        failed=found.failed,
        left_out=found.left_out,
        library=torch.__version__,
        measured_s=time.monotonic() - began,
    )


def _print(progress: Progress) -> None:
    sys.stdout.write(progress.to_line() + "\n")
    sys.stdout.flush()
