"""The command: `python -m stories [NUMBER ...]`, run in the folder `integration`.

It runs the proofs of the criteria of all ten stories, or of some, and prints a table; the exit code
is 1 if a proof fails. All proofs take hours: `--quick` leaves out the programs and the tests of the
session `exhaustive`, and `--list` runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# This lets `python integration/stories` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from stories.proofs import Missing, Proof, Story
from stories.running import Outcome, run_proofs
from stories.table import STORIES

#: The colours of the outcomes of proofs.
_STYLES = {"passed": "green", "failed": "bold red", "missing": "yellow"}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stories", description=__doc__)
    numbers = [story.number for story in STORIES]
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="NUMBER", help="stories; all, if left out"
    )
    parser.add_argument("--list", action="store_true", help="run nothing, print the table")
    parser.add_argument("--quick", action="store_true", help="only the tests of minutes")
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest")
    options = parser.parse_args(argv)
    if unknown := set(options.numbers) - set(numbers):
        parser.error(f"there is no story {min(unknown)}; there are {numbers[0]} to {numbers[-1]}")
    return options


def table_of(stories: Sequence[Story], outcomes: Mapping[Proof, Outcome]) -> Table:
    """Return a line for each proof: its criterion, the number of cases, and their outcome."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("story and criterion", ratio=5)
    table.add_column("proof", ratio=4, overflow="fold")
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for story in stories:
        table.add_row(f"[bold]{story.number} {story.title}[/bold]")
        for criterion in story.criteria:
            for number, proof in enumerate(criterion.proofs):
                text = "" if number else f"  {criterion.text}"
                table.add_row(text, str(proof), *_told(proof, outcomes.get(proof)))
    return table


def _told(proof: Proof, outcome: Outcome | None) -> tuple[str, str]:
    """Return the number of cases, and the word for their outcome."""
    if isinstance(proof, Missing):
        return "", f"[{_STYLES['missing']}]missing[/]"
    if outcome is None:
        return "", "not run"
    style = _STYLES.get(outcome.says, "")
    says = f"[{style}]{outcome.says}[/]" if style else outcome.says
    if outcome.skipped and outcome.count:
        says += f", {outcome.skipped} skipped"
    return f"{outcome.count + outcome.failed:,}", says


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proofs of the stories; return 1 if one failed."""
    options, console = _arguments(argv), Console()
    stories = [one for one in STORIES if not options.numbers or one.number in options.numbers]
    proofs = [proof for one in stories for each in one.criteria for proof in each.proofs]
    outcomes: dict[Proof, Outcome] = {}
    if not options.list:
        outcomes = run_proofs(proofs, jobs=options.jobs, quick=options.quick)
    for proof, outcome in outcomes.items():
        if outcome.failed:
            console.print(f"{proof} failed:\n{outcome.text}", markup=False, highlight=False)
    console.print(table_of(stories, outcomes))
    failed = sum(bool(outcome.failed) for outcome in outcomes.values())
    missing = sum(isinstance(proof, Missing) for proof in proofs)
    console.print(f"{len(proofs)} proofs: {len(outcomes)} run, {failed} failed; "
                  f"{missing} missing")  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
