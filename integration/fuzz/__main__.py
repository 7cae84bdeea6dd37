"""The command: `python -m fuzz [KIND ...]`, run in the folder `integration`; exit code 1 on faults.

It edits files of every kind at random, passes them to their parsers, and reports the results. A
seed repeats an edit: `python -m fuzz plan --first 4711 --count 1 --show`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# This lets `python integration/fuzz` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.kinds import KINDS
from fuzz.watch import outcomes, work
from sbp_core.testing.fuzz import EditOutcome, edited_file

#: The greatest number of faults of a kind that are shown.
_SHOWN = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"all of {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=1_000_000, help="edits over all kinds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the edited files")
    parser.add_argument(
        "--work", nargs=3, metavar=("KIND", "FIRST", "LAST"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(argv)
    if options.work:
        name, first, last = options.work
        work(name, int(first), int(last))
        return 0
    names = options.kinds or list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"no kind is called {unknown[0]!r}; there are {', '.join(KINDS)}")
    last = options.first + max(1, options.count // len(names))
    if options.show:
        for name in names:
            for seed in range(options.first, last):
                sys.stdout.write(edited_file(KINDS[name], seed).decode("utf-8", "replace") + "\n")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("kind", "edits", "used", "refused", "faults", "slowest"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    console, num_faults = Console(), 0
    with ThreadPoolExecutor(options.processes) as pool:
        tried = partial(_tally, console, first=options.first, last=last)
        for name, (found, slowest_s) in zip(names, pool.map(tried, names), strict=True):
            num_faults += found["faults"]
            numbers = (found.total(), *(found[what] for what in ("used", "refused", "faults")))
            table.add_row(name, *(f"{number:,}" for number in numbers), f"{slowest_s:.2f} s")
    console.print(table)
    return 1 if num_faults else 0


def _tally(console: Console, name: str, *, first: int, last: int) -> tuple[Counter[str], float]:
    """Try the edits of a kind; return the number of each outcome, and the longest time."""
    found, slowest_s = Counter[str](), 0.0
    for outcome in outcomes(name, first, last):
        what = "faults" if outcome.fault else "refused" if outcome.error else "used"
        found[what] += 1
        slowest_s = max(slowest_s, outcome.time_s)
        if outcome.fault and found["faults"] <= _SHOWN:
            _show(console, name, outcome)
    return found, slowest_s


def _show(console: Console, name: str, outcome: EditOutcome) -> None:
    told = f"{name}, seed {outcome.seed}: {outcome.fault}"
    console.print(told, style="red", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
