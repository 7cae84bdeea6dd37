"""The results of all programs: counts by micro-batches, and reasons of refusals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from random_programs.program import Program
from random_programs.trial import Outcome

#: Kinds of outcomes, as columns.
KINDS = (
    "equal", "refused", "possible", "refused here", "wrong refusal", "WRONG", "crash", "unstable",
    "invalid",
)  # fmt: skip

_REFUSED = ("refused", "possible", "refused here", "wrong refusal")

Result = tuple[Program, Outcome]


def by_micro_batches(results: Sequence[Result]) -> Table:
    """Return the number of programs with each outcome."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("micro-batches", "programs", *KINDS, "s each"):
        table.add_column(column, justify="right", no_wrap=True)
    rows: dict[int, list[Outcome]] = defaultdict(list)
    for program, outcome in results:
        rows[program.micro_batches].append(outcome)
    for count, outcomes in sorted(rows.items()):
        found = Counter(outcome.kind for outcome in outcomes)
        mean_s = sum(outcome.time_s for outcome in outcomes) / len(outcomes)
        numbers = (len(outcomes), *(found[kind] for kind in KINDS))
        table.add_row(f"{count}", *(f"{number or ''}" for number in numbers), f"{mean_s:.2f}")
    return table


def reasons(results: Sequence[Result]) -> Table:
    """Return why programs were refused, most frequent reasons first."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("refused", "wrongly", "reason", "flags", "such as"):
        table.add_column(column, overflow="fold")
    rows: dict[str, list[Result]] = defaultdict(list)
    for program, outcome in results:
        if outcome.kind in _REFUSED:
            rows[outcome.reason].append((program, outcome))
    for reason, some in sorted(rows.items(), key=lambda row: -len(row[1])):
        wrong = sum(outcome.kind == "wrong refusal" for _, outcome in some)
        some = sorted(some, key=lambda result: result[1].kind != "wrong refusal")
        flags = Counter(flag for program, _ in some for flag in program.meanings)
        told = ", ".join(f"{flag} {count}" for flag, count in flags.most_common(4))
        seeds = ", ".join(f"{program.seed}" for program, _ in some[:3])
        table.add_row(f"{len(some)}", f"{wrong or ''}", reason, told, seeds)
    return table
