"""The command: `python -m signatures --help`, run in the folder `integration`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# This lets `python integration/signatures` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from signatures import grounds, store, summary, survey
from signatures.cache import Cache
from signatures.judge import Finding, Verdict
from signatures.reasons import accident_of
from signatures.variants import DTYPES


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="signatures", description=__doc__)

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    add = parser.add_argument
    add("--ops", type=names, default=[], help="variants (mm) and operators (aten.mm) to survey")
    add("--aten", type=names, default=[], help="only these operators: aten.mm.default,...")
    add("--samples", type=int, default=4, help="samples of a variant in its first dtype")
    add("--dtypes", type=names, default=[], help="float32,float64,int64,bool,complex64")
    add("--ground", choices=("all", "forward", "gradient"), default="all")
    add("--jobs", type=int, default=2, help="processes")
    add("--calls", type=Path, help="file of recorded calls; read if it is there, else written")
    add("--cache", type=Path, help="file of verdicts and discoveries, which grows")
    add("--json", type=Path, help="write all verdicts to this file")
    add("--no-discover", action="store_true", help="only run claims; look for no others")
    add("--width", type=int, help="columns of the printed tables")
    return parser.parse_args(argv)


def _explained(verdict: Verdict, entry: Finding) -> Finding:
    """Return a missed signature; if it has no reason, with a reason of `reasons.py`."""
    reason = entry.reason or accident_of(verdict.op, verdict.shapes, entry.text)
    return replace(entry, reason=reason)


def _calls(options: argparse.Namespace, console: Console) -> store.Calls:
    """Return the recorded calls, from the file if it exists."""
    file = options.calls or Path("build", "signatures", "calls.zip")
    variants = [name for name in options.ops if not name.startswith("aten.")]
    if options.calls is None or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        dtypes = [one for one in DTYPES if not options.dtypes or str(one)[6:] in options.dtypes]
        with _bar(console) as bar:
            task = bar.add_task("tracing", total=None, note="")

            def advanced(name: str, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, note=name)

            recording = store.collect(
                variants, samples=options.samples, dtypes=dtypes, jobs=options.jobs,
                advanced=advanced,
            )  # fmt: skip
        store.save(recording, file)
    ground = [] if options.ground == "all" else [options.ground]
    return store.Calls(file, store.Selection(variants, options.dtypes, ground))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console,
    )  # fmt: skip


def _print_untraced(console: Console, calls: store.Calls) -> None:
    """Print the variants that could not be sampled, with reasons."""
    table = Table(title="not testable, or not wholly", title_justify="left")
    for name in ("variant", "ground", "reason"):
        table.add_column(name, overflow="fold")
    for (variant, ground), reason in calls.left_out.items():
        table.add_row(variant, ground, reason)
    if table.row_count:
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the survey; the exit status is 1 if a claim is wrong."""
    options = _arguments(argv)
    torch.set_num_threads(1)
    console = Console(width=options.width)
    started = time.monotonic()
    calls = _calls(options, console)
    wanted = [*options.aten, *(name for name in options.ops if name.startswith("aten."))]
    ops = [op for op in calls if not wanted or any(f"{op}.".startswith(f"{w}.") for w in wanted)]
    for name in wanted:
        if not any(f"{op}.".startswith(f"{name}.") for op in ops):
            console.print(f"no sample calls {name}")
    with _bar(console) as bar:
        task = bar.add_task("judging", total=None, note="")

        def tell(progress: survey.Progress) -> None:
            note = f"wrong {progress.wrong}, missed {progress.missed}, {progress.op}"
            bar.update(task, completed=progress.calls, total=progress.all_calls, note=note)

        verdicts = survey.run(
            calls, ops, Cache(options.cache),
            survey.Options(jobs=options.jobs, search=not options.no_discover), tell,
        )  # fmt: skip
    for verdict in verdicts:
        verdict.missed = [_explained(verdict, entry) for entry in verdict.missed]
    few = bool(wanted or options.ops)
    if few:
        summary.print_details(console, verdicts)
    summary.print_ops(console, verdicts, all_ops=few)
    if not wanted:
        grounds.print_grounds(console, grounds.variant_states(calls, verdicts))
    if not few:
        _print_untraced(console, calls)
        grounds.print_core(console, verdicts)
    summary.print_totals(console, verdicts)
    console.print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        states = grounds.variant_states(calls, verdicts)
        value = {
            "totals": dict(summary.totals(verdicts)),
            "variants": {ground.name: dict(found) for ground, found in states.items()},
            "verdicts": [one.to_json() for one in verdicts],
        }
        options.json.write_text(json.dumps(value, indent=1), "utf-8")
    return int(any(verdict.wrong for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
