"""Time a training step with slow data: loaded when the step needs it, or ahead of time.

`python integration/benchmarks/data_time.py [ROUNDS]`. A smaller version of the default GPT, on two
ranks as threads. A sample takes some milliseconds: of waiting, as for a disk, or of decoding in a
library that releases the interpreter lock. Prints the median wall time of a step, with the ways
interleaved, and the processor time of a step of all threads. Nothing is asserted: machines differ.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sbp_core.plugins import discover
from sbp_core.units import format_seconds
from sbp_launch import parallelize
from sbp_launch.data import BatchLoader, DataCursor, LocalPart, SampleOrder, SampleSource

BATCH_SIZE = 16


def wait(seconds: float) -> None:
    """Wait, as for a disk."""
    time.sleep(seconds)


def decode(seconds: float) -> None:
    """Compute without the interpreter lock, as a decoder of images does."""
    ended = time.perf_counter() + seconds
    block = bytes(1 << 18)
    while time.perf_counter() < ended:
        hashlib.blake2b(block)


class Slow:
    """A data set whose samples take time."""

    def __init__(self, data: Any, cost: Callable[[float], None], sample_s: float) -> None:
        self.data, self.cost, self.sample_s = data, cost, sample_s

    def num_samples(self, split: str = "train") -> int:
        return int(self.data.num_samples(split))

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> Mapping[str, Tensor]:
        if self.sample_s:
            self.cost(self.sample_s * len(numbers))
        found: Mapping[str, Tensor] = self.data.samples(numbers, split)
        return found

    def describe(self) -> str:
        return "slow"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    registry = discover(strict=True)
    text = registry.make("data", "stdlib", {})
    model: Any = registry.make("model", "gpt", {"num_layers": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    example = text.samples(np.zeros(BATCH_SIZE, np.int64))
    plugin = registry.entry("data", "stdlib")
    cursor = DataCursor(order=SampleOrder(num_samples=text.num_samples()))
    with parallelize(
        model, lambda m, b: m.loss(b), example, optimizer, mesh=2, planner="manual/data_parallel"
    ) as step:
        for _ in range(5):
            step(example)
        bare = statistics.median(timed(lambda: example, step, 9)[0])
        print(f"a step alone: {format_seconds(bare)}; slow data take half of that for a batch")
        ways = {
            (name, ahead): BatchLoader(
                SampleSource(
                    data=Slow(text, cost, bare / 2 / BATCH_SIZE),
                    plugin=plugin,
                    dtype=torch.float32,
                ),
                "train",
                cursor,
                BATCH_SIZE,
                LocalPart(step.plan, [0, 1]),
                ahead=ahead,
            )
            for name, cost in (("waiting", wait), ("decoding", decode))
            for ahead in (0, 2)
        }
        found: dict[tuple[str, int], tuple[list[float], list[float]]] = {
            way: ([], []) for way in ways
        }
        for _ in range(3):
            for way, loader in ways.items():
                walls, works = timed(lambda: loader.next().values, step, rounds)  # noqa: B023
                found[way][0].extend(walls[2:])  # the first batches were loaded before
                found[way][1].extend(works[2:])
        for loader in ways.values():
            loader.close()
    print(
        f"{'data':10} {'ahead':>6} {'wall of a step':>15} {'over the step alone':>20} {'work':>9}"
    )
    for (name, ahead), (walls, works) in found.items():
        wall, work = statistics.median(walls), statistics.median(works)
        over = f"{wall / bare - 1:+.0%}"
        print(
            f"{name:10} {ahead:6} {format_seconds(wall):>15} {over:>20} {format_seconds(work):>9}"
        )


def timed(
    load: Callable[[], Mapping[str, Tensor]], step: Callable[[Any], Any], count: int
) -> tuple[list[float], list[float]]:
    """Return the wall seconds and the processor seconds of some steps with loading."""
    walls, works = [], []
    for _ in range(count):
        wall, work = time.perf_counter(), time.process_time()
        float(step(load()))
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    return walls, works


if __name__ == "__main__":
    main()
