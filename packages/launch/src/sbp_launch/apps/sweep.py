"""Print the table of results of a sweep (`--multirun`), also if some of its runs have failed.

run  optimizer.lr  steps  loss    held-out  best            tokens/s  folder
0    0.001         100    2.4101  2.4272    2.4272          14,452    0
1    0.1           3      nan                                         1
run 1 failed: the loss is nan; the last finite loss was 5.2, of step 2

Runs of `sbp-plan` have no numbers; the table shows which of them have a plan.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import Box
from rich.console import Console
from rich.table import Table

from sbp_core.serialize import parse, read_text
from sbp_launch.run.folder import as_typed
from sbp_launch.run.result import read_result
from sbp_launch.settings.config import key_of

#: Table style with a line below the heads only.
_BOX = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")

#: Width that the column of a setting may always take, in characters.
_KEY = 24

_NUMBERS = ("steps", "loss", "held-out", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One run of a sweep that has begun.

    Args:
        number: Its index in the sweep.
        overrides: Its overrides.
        folder: Its run folder.
        failure: Why it failed, in a line; empty if it did not fail.
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SweepNotes:
    """Records of the runs of a sweep, which may be in other processes, as files in a folder.

    Args:
        folder: Folder that all of these processes can access.
    """

    folder: Path

    def write(self, job: SweepJob) -> None:
        """Write or replace the record of a run."""
        part = self.folder / f"{job.number}.part"
        # A cluster job may outlive the process that started the sweep, which removes the folder.
        with suppress(FileNotFoundError):
            part.write_text(json.dumps(asdict(job), default=str), "utf-8")
            part.replace(part.with_suffix(".json"))

    def read(self) -> list[SweepJob]:
        """Return the runs that have begun, in their order."""
        jobs = []
        for path in self.folder.glob("*.json"):
            found = parse(read_text(path))
            overrides, folder = tuple(found.pop("overrides")), Path(found.pop("folder"))
            jobs.append(SweepJob(overrides=overrides, folder=folder, **found))
        return sorted(jobs, key=lambda job: job.number)


def objective(folder: Path) -> float | None:
    """Return the objective for a sweeper: the best held-out loss of a run, or else its loss."""
    result = read_result(folder)
    if result is None:
        return None
    return result.loss if result.best is None else result.best


def print_sweep(jobs: Sequence[SweepJob], console: Console) -> None:
    """Print the results of a sweep, in a table with a row for each run."""
    results = [read_result(job.folder) for job in jobs]
    # Only overrides that differ between runs get a column.
    common = set.intersection(*(set(job.overrides) for job in jobs))
    texts = (text for job in jobs for text in job.overrides if text not in common)
    keys = list(dict.fromkeys(key_of(text) for text in texts))
    parent = Path(os.path.commonpath([job.folder.parent for job in jobs]))
    measured = [one for one in results if one is not None]
    heads = _NUMBERS if measured else ()  # plans have none
    if any(one.rate for one in measured):
        heads = (*heads, f"{measured[0].unit}/s")
    table = Table(box=_BOX, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("run", justify="right")
    for key in keys:
        table.add_column(key, overflow="fold", min_width=min(len(key), _KEY))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("folder", overflow="fold")
    for job, result in zip(jobs, results, strict=True):
        cells = [""] * len(heads)
        if result is not None:
            losses = (_loss(one) for one in (result.loss, result.held_out_loss, result.best))
            rate = result.rate
            told = "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            cells = [str(result.step), *losses, told][: len(heads)]
        values = dict(text.partition("=")[::2] for text in job.overrides)
        table.add_row(
            str(job.number),
            *(values.get(key, "") for key in keys),
            *cells,
            str(job.folder.relative_to(parent)),
        )
    console.print(f"\nthe runs of {as_typed(parent)}:", soft_wrap=True)
    console.print(table)
    for job, result in zip(jobs, results, strict=True):
        if job.failure:
            # The failure of the training is more precise than that of its process.
            failure = (result.failure if result is not None else "") or job.failure
            failure = failure.partition("\n")[0]
            text = f"run {job.number} failed: {failure}"
            console.print(text, soft_wrap=True)
    best = [
        (one.best, job.number)
        for job, one in zip(jobs, results, strict=True)
        if one is not None and one.best is not None
    ]
    if len(best) > 1:
        loss, number = min(best)
        console.print(f"lowest held-out loss: {loss:.4f}, of run {number}")


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)
