"""The command: `python -m kills --help`, run in the folder `integration`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# This lets `python integration/kills` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from kills.saves import SavingOutcome, Trials
from kills.training import (
    TRAINING_HOWS,
    TRAINING_WAYS,
    Moment,
    TrainingOutcome,
    run_training_trial,
)
from kills.trial import WAYS, How, Outcome, run_trial

#: Number of lines of a faulty trial that are shown.
_SHOWN = 40


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kills", description=__doc__)
    add = parser.add_argument
    every = (*WAYS, *TRAINING_WAYS)
    add(
        "--ways",
        nargs="+",
        choices=every,
        default=every,
        help="backends; of training, launchers; all, if left out",
    )
    add("--how", nargs="+", choices=[str(how) for how in How], default=[str(how) for how in How])
    add("--count", type=int, default=50, help="kills of each way, shared among the kinds of kill")
    add("--ranks", type=int, default=3)
    add("--deadline", type=float, default=3.0, help="seconds that a step may wait; not of training")
    add("--seed", type=int, default=0)
    add("--training", action="store_true", help="of sbp-train, at each moment of a run")
    moments = [str(moment) for moment in Moment]
    add("--moments", nargs="+", choices=moments, default=moments, help="of training")
    add("--saves", action="store_true", help="of a process that saves, --count in each way of it")
    add("--json", type=Path, help="write all outcomes to this file")
    return parser.parse_args(argv)


def table_of(outcomes: Sequence[Outcome], deadline_s: float) -> Table:
    """Return the figures by way and kind of kill."""
    table = Table(
        title=f"Seconds from the kill; deadline of a step: {deadline_s:g} s",
        caption="median, worst: other ranks down; told: a rank was told which one failed, worst\n"
        "all: nothing runs any more\n"
        "named: the failing rank was, by ranks, or in the last message of the run",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("", no_wrap=True)
    for name in (
        "kills",
        "median",
        "worst",
        "told",
        "all",
        "named",
        "by ranks",
        "by run",
        "faults",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for way in dict.fromkeys(outcome.way for outcome in outcomes):
        of_way = [row for row in outcomes if row.way == way]
        table.add_row(way, style="bold")
        for how in sorted({row.how for row in of_way}):
            table.add_row(f"  {how}", *_figures([row for row in of_way if row.how == how]))
    return table


def _figures(rows: Sequence[Outcome]) -> list[str]:
    down = [row.others_down_s for row in rows if row.others_down_s is not None]
    named = [row.named_s for row in rows if row.named_s is not None]
    return [
        str(len(rows)),
        f"{statistics.median(down):.2f}" if down else "never",
        f"{max(down):.2f}" if len(down) == len(rows) else "never",
        f"{max(named):.2f}" if named else "never",
        f"{max(row.all_down_s for row in rows):.2f}",
        str(sum(bool(row.named_by) for row in rows)),
        str(sum(any(name.startswith("rank") for name in row.named_by) for row in rows)),
        str(sum("run" in row.named_by for row in rows)),
        str(sum(bool(row.faults) for row in rows)),
    ]


def line_of(outcome: Outcome) -> str:
    """Return the line of a trial, which is shown at once."""
    down = outcome.others_down_s
    others = "never down" if down is None else f"down after {down:5.2f} s"
    named = f"named by {', '.join(outcome.named_by)}" if outcome.named_by else "named by nobody"
    what = f"{outcome.way:<16}  {outcome.how:<9} of rank {outcome.failing_rank}"
    return f"{what}: others {others}; {named}"


def show(console: Console, line: str, outcome: Outcome | TrainingOutcome) -> None:
    """Show the outcome of a trial: its line, and if it is faulty, its faults and its output."""
    written = outcome.lines[-_SHOWN:] if outcome.faults else ()
    style = "red" if outcome.faults else None
    told = [line, *(f"  {fault}" for fault in outcome.faults)]
    for text in told:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    for text in written:
        console.print(f"    {text}", markup=False, highlight=False, soft_wrap=True)


def run_trials(options: argparse.Namespace, console: Console) -> Iterator[Outcome]:
    """Run the requested trials, and show the progress."""
    draw, hows = random.Random(options.seed), [How(name) for name in options.how]
    ways = [way for name, way in WAYS.items() if name in options.ways]
    plan = [
        (way, how)
        for way in ways
        for how in islice(cycle([how for how in hows if how in way.hows]), options.count)
    ]
    columns = (TextColumn("{task.description:<27}"), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("kills", total=len(plan))
        for way, how in plan:
            progress.update(task, description=f"{way.name}: {how}")
            outcome = run_trial(
                way, how, num_ranks=options.ranks, deadline_s=options.deadline, draw=draw
            )
            show(console, line_of(outcome), outcome)
            progress.advance(task)
            yield outcome


def training_table(outcomes: Sequence[TrainingOutcome]) -> Table:
    """Return the figures of training by launcher and kind of kill."""
    table = Table(title="Training: seconds to the end", box=SIMPLE_HEAD)
    for name in ("", "kills", "median", "worst", "faults"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for way in dict.fromkeys(outcome.way for outcome in outcomes):
        for how in dict.fromkeys(outcome.how for outcome in outcomes):
            rows = [row for row in outcomes if (row.way, row.how) == (way, how)]
            down = [row.down_s for row in rows if row.down_s is not None]
            if rows:
                table.add_row(
                    f"{way}: {how}",
                    str(len(rows)),
                    f"{statistics.median(down):.2f}" if down else "never",
                    f"{max(down):.2f}" if len(down) == len(rows) else "never",
                    str(sum(bool(row.faults) for row in rows)),
                )
    return table


def train_and_kill(options: argparse.Namespace, console: Console) -> Iterator[TrainingOutcome]:
    """Kill training in every way, at every moment, in turns; show faults."""
    draw = random.Random(options.seed)
    hows = [how for how in TRAINING_HOWS if how in options.how]
    cases = [(how, moment) for how in hows for moment in Moment if moment in options.moments]
    for way in (way for way in TRAINING_WAYS if way in options.ways):
        for how, moment in islice(cycle(cases), options.count):
            outcome = run_training_trial(
                way,
                how,
                moment,
                num_ranks=options.ranks,
                # The first rank commits.
                failing_rank=draw.randrange(1 if moment is Moment.COMMIT else options.ranks),
            )
            down = "never" if outcome.down_s is None else f"{outcome.down_s:.2f} s"
            line = f"{way}: {how} of rank {outcome.failing_rank} at {moment}: down after {down}"
            show(console, line, outcome)
            yield outcome


def save_and_kill(options: argparse.Namespace, console: Console) -> Iterator[SavingOutcome]:
    """Kill processes that save, in every way of saving; show faults."""
    with tempfile.TemporaryDirectory() as folder:
        for outcome in Trials(Path(folder), random.Random(options.seed)).run(options.count):
            for fault in outcome.faults:
                text = f"{outcome.way}: {fault}"
                console.print(text, style="red", markup=False, soft_wrap=True)
            yield outcome


def saving_table(outcomes: Sequence[SavingOutcome]) -> Table:
    """Return the figures of kills by way of saving: what they interrupted, and faults."""
    table = Table(title="Kills of a process that saves", box=SIMPLE_HEAD)
    columns = ("", "kills", "between saves", "while one is written", "while one is replaced")
    for name in (*columns, "newest step", "faults"):
        table.add_column(name, justify="right" if name else "left")
    for way in dict.fromkeys(outcome.way for outcome in outcomes):
        rows = [outcome for outcome in outcomes if outcome.way == way]
        replaced = sum(any(name.endswith(".old") for name in row.left) for row in rows)
        between = sum(not row.left for row in rows)
        counts = (len(rows), between, len(rows) - between - replaced, replaced)
        faults = sum(bool(row.faults) for row in rows)
        table.add_row(way, *map(str, (*counts, rows[-1].found_step, faults)))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if there was a fault, 130 after Ctrl-C."""
    options, console, outcomes = _arguments(argv), Console(), list[Any]()
    trials = save_and_kill if options.saves else train_and_kill if options.training else run_trials
    status = 0
    try:
        for outcome in trials(options, console):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        status = 130
    finally:
        if options.saves:
            table = saving_table(outcomes)
        elif options.training:
            table = training_table(outcomes)
        else:
            table = table_of(outcomes, options.deadline)
        console.print(table if outcomes else "no rank was killed")
        if options.json is not None:
            rows = [asdict(outcome) for outcome in outcomes]
            options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    return status or int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
