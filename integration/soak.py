"""The command: `python -m soak`, in the folder `integration`. A long run without growth.

It trains a tiny model by `parallelize` in processes, and samples memory, threads and open files of
each of them. A figure is flat if it is no larger at the end than in the second quarter: caches and
allocators may grow in the first quarter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import discover
from sbp_core.processes import Line, supervise
from sbp_launch import parallelize
from sbp_launch.world import World

#: Number of samples in a run; a quarter of them is the least number for a median.
NUM_SAMPLES = 40

#: Allowed growth of a process' memory from the second to the last quarter, by its allocator.
TOLERATED_BYTES = 2 << 20

#: Steps per second on the slowest machine, for the time limit of a run.
_STEPS_PER_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources of a process after some steps."""

    rank: int
    step: int
    memory_bytes: int
    threads: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of a process' resources from the second to the last quarter of a run."""

    rank: int
    memory_bytes: int
    threads: int
    files: int

    @property
    def is_flat(self) -> bool:
        return self.memory_bytes <= TOLERATED_BYTES and self.threads <= 0 and self.files <= 0


def sampled(rank: int, step: int) -> Sample:
    """Return the present resources of this process (Linux)."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line
    )
    return Sample(
        rank=rank,
        step=step,
        memory_bytes=int(status["RssAnon"].split()[0]) << 10,
        threads=int(status["Threads"]),
        files=len(list(Path("/proc/self/fd").iterdir())),
    )


def growth(samples: Sequence[Sample]) -> Growth:
    """Compare medians of the last and of the second quarter of one process' samples."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def more(name: str) -> int:
        values = [[getattr(one, name) for one in part] for part in (late, early)]
        return int(statistics.median(values[0]) - statistics.median(values[1]))

    return Growth(
        rank=samples[0].rank,
        memory_bytes=more("memory_bytes"),
        threads=more("threads"),
        files=more("files"),
    )


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(batch["x"])
    return (out - batch["y"]).square().mean()


def train(steps: int) -> None:
    """Train as one rank of several, and regularly print a sample as a line of JSON."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [{"x": torch.randn(8, 16), "y": torch.randn(8, 8)} for _ in range(4)]
    rank = World.of_environment().rank
    every = max(1, steps // NUM_SAMPLES)
    with parallelize(model, square, batches[0], optimizer, planner="manual/zero") as step:
        for index in range(1, steps + 1):
            out = step(batches[index % len(batches)], lr=1e-3 * (1 - index / steps))
            if index % every == 0:
                found = {**asdict(sampled(rank, index)), "loss": out.item()}
                print(json.dumps(found), flush=True)


def run(boxing: str, ranks: int, steps: int) -> list[Sample]:
    """Train in processes; return their samples.

    Raises:
        AssertionError: a rank failed.
    """
    backend = discover(strict=True).make("boxing", boxing, {})
    assert isinstance(backend, BoxingBackend)
    command = [sys.executable, "-m", "soak", "--steps", str(steps), "--is-rank"]
    samples: list[Sample] = []
    others: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{boxing}, {ranks} processes", total=steps)

        def hear(line: Line) -> None:
            if not line.text.startswith('{"rank"'):
                others.append(str(line))
                return
            found = json.loads(line.text)
            loss = found.pop("loss")
            samples.append(Sample(**found))
            progress.update(task, completed=found["step"], description=f"{boxing} loss {loss:.4f}")

        limit_s = 120 + steps / _STEPS_PER_S
        ended = supervise(backend.launch_specs(ranks, command), timeout_s=limit_s, on_line=hear)
    assert ended.error() is None, "\n".join([*others, str(ended.error())])
    return samples


def table_of(boxing: str, samples: Sequence[Sample], steps: int) -> tuple[Table, bool]:
    """Return the figures of each process, and whether all of them are flat."""
    table = Table(
        title=f"boxing={boxing}: {steps:,} steps",
        caption="growth: median of the last quarter less that of the second",
        box=SIMPLE_HEAD,
    )
    for name in ("rank", "memory at the end", "growth", "threads", "growth", "files", "growth"):
        table.add_column(name, justify="right", no_wrap=True)
    flat = True
    for rank in sorted({one.rank for one in samples}):
        own = [one for one in samples if one.rank == rank]
        more, last = growth(own), own[-1]
        flat &= more.is_flat
        table.add_row(
            str(rank),
            f"{last.memory_bytes / 2**20:.1f} MiB",
            f"{more.memory_bytes / 2**10:+,.0f} KiB",
            *(str(last.threads), f"{more.threads:+}", str(last.files), f"{more.files:+}"),
            style="" if more.is_flat else "red",
        )
    return table, flat


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all figures are flat."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=20_000)
    add("--ranks", type=int, default=4)
    add("--boxing", nargs="+", default=["torch", "mpi"])
    add("--is-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.steps < NUM_SAMPLES:
        parser.error(f"--steps has to be {NUM_SAMPLES} at least: so many samples are taken")
    if given.is_rank:
        train(given.steps)
        return 0
    all_flat = True
    for boxing in given.boxing:
        table, flat = table_of(boxing, run(boxing, given.ranks, given.steps), given.steps)
        Console().print(table)
        all_flat &= flat
    return 0 if all_flat else 1


if __name__ == "__main__":
    sys.exit(main())
