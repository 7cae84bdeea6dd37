"""The command: `python -m kills --help`, run in the folder `integration`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# `python integration/kills` is to find the package too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from kills.trial import WAYS, How, Outcome, run_trial

#: Lines of a faulty trial that are shown.
_SHOWN = 40


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kills", description=__doc__)
    add = parser.add_argument
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="backends, launchers")
    add("--how", nargs="+", choices=[str(how) for how in How], default=[str(how) for how in How])
    add("--count", type=int, default=50, help="kills of each way, shared among the kinds of kill")
    add("--ranks", type=int, default=3)
    add("--deadline", type=float, default=3.0, help="seconds that a step may wait")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write all outcomes to this file")
    return parser.parse_args(argv)


def table_of(outcomes: Sequence[Outcome], deadline_s: float) -> Table:
    """Return the figures by way and kind of kill."""
    table = Table(title=f"Seconds from the kill; deadline of a step: {deadline_s:g} s")
    for name in ("backend (launcher)", "kill"):
        table.add_column(name, no_wrap=True)
    for name in ("trials", "others down: median", "worst", "all down: worst", "named", "faults"):
        table.add_column(name, justify="right")
    for way, how in dict.fromkeys((outcome.way, outcome.how) for outcome in outcomes):
        rows = [row for row in outcomes if (row.way, row.how) == (way, how)]
        down = [row.others_down_s for row in rows if row.others_down_s is not None]
        by_ranks = sum(any(name != "launcher" for name in row.named_by) for row in rows)
        named = sum(bool(row.named_by) for row in rows)
        table.add_row(
            way,
            str(how),
            str(len(rows)),
            f"{statistics.median(down):.2f}" if down else "never",
            f"{max(down):.2f}" if len(down) == len(rows) else "never",
            f"{max(row.all_down_s for row in rows):.2f}",
            f"{named} ({by_ranks} by ranks)",
            str(sum(bool(row.faults) for row in rows)),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if anything that must hold did not."""
    options = _arguments(argv)
    console, draw = Console(), random.Random(options.seed)
    hows = [How(name) for name in options.how]
    turns = [hows[turn % len(hows)] for turn in range(options.count)]
    plan = [(WAYS[name], how) for name in options.ways for how in turns]
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("kills", total=len(plan))
        for way, how in plan:
            progress.update(task, description=f"{way.name}: {how}")
            outcome = run_trial(
                way, how, num_ranks=options.ranks, deadline_s=options.deadline, draw=draw
            )
            outcomes.append(outcome)
            for fault in outcome.faults:
                console.print(f"{way.name}, {how} of rank {outcome.culprit}: {fault}", style="red")
            if outcome.faults:
                console.print("\n".join(outcome.lines[-_SHOWN:]), markup=False, highlight=False)
            progress.advance(task)
    console.print(table_of(outcomes, options.deadline))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in outcomes], indent=1), "utf-8")
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
