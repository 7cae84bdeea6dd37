"""Compare the schedule that `auto` finds with every named schedule, in simulated time.

    python integration/benchmarks/auto_schedules.py

prints the table of docs/reference/pipelines.md: for ranks p, micro-batches m, times and memory, the
best named schedules with one and with two chunks per rank, and the schedule that `auto` finds, with
the activations alive on the fullest rank. Only the duration of the search is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from fractions import Fraction

from sbp_core.errors import ConfigError
from sbp_core.pipeline import SCHEDULES, SimulatedSchedule, pipeline_schedule, simulate_schedule

Times = list[object]
SIZES = [(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16)]


def times_of(p: int) -> dict[str, Times]:
    """Return the times of p ranks, by their names in the table."""
    return {
        "1, 1, 1": [1, 1, 1],
        "1, 1.25, 0.75": [1, Fraction(5, 4), Fraction(3, 4)],
        "1, 0.75, 1.25": [1, Fraction(3, 4), Fraction(5, 4)],
        "1, 1, 1; last rank half more": [
            *([[1, 1, 1]] * (p - 1)),
            [Fraction(3, 2), Fraction(3, 2), Fraction(3, 2)],
        ],
    }


def named(p: int, m: int, times: Times, memory: int | None) -> Iterator[SimulatedSchedule]:
    """Yield every named schedule that flushes, fits into the memory, and is defined."""
    for name in SCHEDULES:
        for chunks in (1, 2):
            try:
                schedule = pipeline_schedule(name, p, m, num_chunks=chunks, memory=memory)
            except ConfigError:
                continue
            if name != "auto" and schedule.flushes:
                yield simulate_schedule(schedule, times)


def main() -> None:
    """Print the table."""
    write = sys.stdout.write
    write(
        "| p | m | F, I, W | memory | best named | makespan | alive | auto | alive | shorter by |\n"
    )
    write("|---|---|---|---|---|---|---|---|---|---|\n")
    longest = 0.0
    for p, m in SIZES:
        for told, times in times_of(p).items():
            for memory in (None, p):
                best = min(
                    named(p, m, times, memory), key=lambda one: (one.makespan, max(one.live))
                )
                began = time.perf_counter()
                schedule = pipeline_schedule("auto", p, m, times=times, memory=memory)
                longest = max(longest, time.perf_counter() - began)
                found = simulate_schedule(schedule, times)
                gain = 1 - found.makespan / best.makespan
                chunks = best.schedule.num_chunks
                write(
                    f"| {p} | {m} | {told} | {memory or 'any'} | `{best.schedule.name}`, "
                    f"{chunks} chunk{'s' * (chunks > 1)} | {float(best.makespan):g} | "
                    f"{float(max(best.live)):g} | {float(found.makespan):g} | "
                    f"{float(max(found.live)):g} | {100 * float(gain):.2f} % |\n"
                )
                sys.stdout.flush()
    write(f"\nThe longest search took {longest:.1f} s.\n")


if __name__ == "__main__":
    main()
