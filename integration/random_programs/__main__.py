"""The command: `python -m random_programs`, run in the folder `integration`; exit code 1 on faults.

python -m random_programs --count 1000                     seeds 0 to 999, on any layout
python -m random_programs --micro-batches 1                only with one micro-batch
python -m random_programs --seed 4711 --count 1 --show     the source of one program
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.console import Console

from fuzz.watch import outcomes
from random_programs.blocks import LAYOUTS
from random_programs.oracle import judged
from random_programs.program import draw
from random_programs.shrink import explains, fault_of, shrunk
from random_programs.table import Result, by_micro_batches, reasons
from random_programs.trial import Outcome, attempt

#: Number of programs of a process, which are enough to detect leaks.
_PROGRAMS_OF_WORKER = 250


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = _options(argv)
    if options.show:
        for seed in range(options.seed, options.seed + options.count):
            print(draw(seed, options.micro_batches, options.layouts).source)
        return 0
    if options.work:
        _work(options)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    began = time.perf_counter()
    results = list(_results(options, console))
    console.print(by_micro_batches(results), reasons(results))
    console.print(f"{len(results)} programs in {time.perf_counter() - began:.0f} s")
    _show_causes(console, results, options.shrink)
    return 1 if any(outcome.failed for _, outcome in results) else 0


def _show_causes(console: Console, results: Sequence[Result], most: int) -> None:
    """Print a minimal program for each cause of a fault, or of a wrong refusal."""
    left = [(p, o) for p, o in results if o.failed or o.kind == "wrong refusal"]
    left.sort(key=lambda result: not result[1].failed)
    for _ in range(most):
        if not left:
            return
        program, outcome = left[0]
        minimal, found = shrunk(program, outcome)
        same = [
            (p, o) for p, o in left if fault_of(o) == fault_of(outcome) and explains(minimal, p)
        ]
        console.rule(f"{outcome.kind}, seed {program.seed}, explains {len(same)}: {found.reason}")
        print(found.message, minimal.source, sep="\n\n", flush=True)
        left = [(p, o) for p, o in left[1:] if not any(p is other for other, _ in same)]
    if left:
        console.print(f"{len(left)} programs are left that none of these explains")


def _results(options: argparse.Namespace, console: Console) -> Iterator[Result]:
    """Run programs in watched processes; yield the outcome of each, in order of seeds."""
    last = options.seed + options.count
    firsts = range(options.seed, last, _PROGRAMS_OF_WORKER)
    given = ["--micro-batches", ",".join(map(str, options.micro_batches))]
    given += [f"--layout={layout}" for layout in options.layouts]

    def command(_: str, first: int, stop: int) -> list[str]:
        own = ["--work", "--seed", str(first), "--count", str(stop - first)]
        return [sys.executable, "-m", "random_programs", *own, *given]

    def run(first: int) -> list[Result]:
        stop = min(last, first + _PROGRAMS_OF_WORKER)
        found = []
        for made in outcomes("", first, stop, command_of=command):
            kind = "crash" if made.error == "ended" else made.error
            outcome = Outcome(kind=kind, message=made.fault, time_s=made.time_s)
            if outcome.failed or kind == "wrong refusal":
                told = f"seed {made.seed}: {kind}: {outcome.reason}"
                console.print(told, style="red", markup=False, highlight=False, soft_wrap=True)
            found.append((draw(made.seed, options.micro_batches, options.layouts), outcome))
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(run, firsts):
            yield from found


def _work(options: argparse.Namespace) -> None:
    """Run programs one by one, and print the outcome of each for `fuzz.watch`."""
    torch.set_num_threads(1)
    for seed in range(options.seed, options.seed + options.count):
        print(f"seed {seed}", flush=True)
        program = draw(seed, options.micro_batches, options.layouts)
        made = judged(program, attempt(program))
        line = {"seed": seed, "error": made.kind, "fault": made.message, "time_s": made.time_s}
        print(json.dumps(line), flush=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="random_programs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="programs")
    parser.add_argument(
        "--micro-batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 2, 4, 0],
        help="some of these; 0 is the number of samples",
    )
    parser.add_argument(
        "--layout", dest="layouts", action="append", default=[], choices=list(LAYOUTS)
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--shrink", type=int, default=10, help="minimal programs that are printed")
    parser.add_argument("--show", action="store_true", help="only print the programs")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
