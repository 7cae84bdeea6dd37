"""Compare predicted and measured time of a step, in cells of the matrix of models and layouts.

    python integration/benchmarks/prediction_error.py [ROUNDS] [--all] [--cluster FILE ...]
        [--operators own | others] [--boxing local | torch | mpi] [--ranks N] [--json FILE]

All layouts of a model are compiled for one machine, started on the actor runtime with ranks as
threads, and run in turns, so that other load of the machine slows all of them. The measured time is
the median of ROUNDS steps after a warm-up. The predicted time is that of `simulate` for the plan,
as in the output of the trainer. The machine is the cluster profile `local`, with declared rates, or
the calibration by `sbp-calibrate` for the same boxing: of several files, the one with the fewest
ranks that suffice. `--operators` adds times of operators, which were measured in traced steps of
the same plan, or of other layouts with as many ranks, which have some calls in common. With
`--boxing torch` (gloo) or `mpi`, ranks are processes with one thread, started by `mpiexec`; layouts
of a model with the same number of ranks take turns.

The output shows, for each cell, both times and the error, predicted / measured - 1 (-50 % is half
of the measured time); then the median of absolute errors; and for each model Kendall's rank
correlation of the predicted and the measured order of its layouts: the fraction of pairs in the
right order minus the fraction in the wrong order, where ties count as neither. 1 is the same order,
0 is no correlation, -1 is the reverse. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median

from prediction_cells import Cell, Threads, Trial, cells_of

# isort: split
from models.programs import PROGRAMS
from models.trial import TOLERANCES
from sbp_core.plugins import discover
from sbp_core.processes import mpiexec_specs
from sbp_core.units import format_seconds

#: The models that run without `--all`: one of each kind.
FEW_PROGRAMS = ("gpt2", "vit", "resnet18", "dlrm", "moe")

#: Seconds that the processes of one model and number of ranks may take to start, and for a step.
MOST_S = 300.0, 20.0

RANK = Path(__file__).with_name("prediction_rank.py")


def cells_of_processes(name: str, trial: Trial, boxing: str) -> list[Cell]:
    """Return the cells of a program, whose ranks are processes."""
    found = []
    for num_ranks in sorted({prod(way.mesh) for way in trial.layouts(name).values()}):
        asked = replace(trial, num_ranks=num_ranks)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cells.json"
            given = [name, boxing, json.dumps(asdict(asked)), str(out)]
            (spec,) = mpiexec_specs(num_ranks, [sys.executable, str(RANK), *given])
            environment = {**os.environ, **spec.defaults, **spec.environment}
            environment["OMP_NUM_THREADS"] = "1"
            most_s = MOST_S[0] + MOST_S[1] * trial.rounds
            subprocess.run(spec.command, env=environment, check=True, timeout=most_s)
            found += [Cell(**one) for one in json.loads(out.read_text("utf-8"))]
    return found


def kendall(cells: Sequence[Cell]) -> float:
    """Return the rank correlation of predicted and measured times: Kendall's tau a."""
    products = [
        (one.predicted_s - other.predicted_s) * (one.measured_s - other.measured_s)
        for one, other in combinations(cells, 2)
    ]
    return sum((product > 0) - (product < 0) for product in products) / len(products)


def order_line(name: str, cells: Sequence[Cell]) -> str:
    """Return the line about the order of a model's layouts."""
    tau = kendall(cells)
    chosen = min(cells, key=lambda cell: cell.predicted_s)
    fastest = min(cells, key=lambda cell: cell.measured_s)
    return (
        f"{name:12} {tau:+.2f} over {len(cells)} layouts: {'the same' if tau == 1 else 'another'} "
        f"order; predicted fastest {chosen.layout}, which takes "
        f"{chosen.measured_s / fastest.measured_s:.2f} of the fastest, {fastest.layout}"
    )


def main() -> None:
    options = _options()
    registry = discover(strict=True)
    trial = Trial(
        rounds=options.rounds,
        dtype=options.dtype,
        clusters=[str(file) for file in options.cluster],
        operators=options.operators,
        num_ranks=options.ranks,
        boxing=options.boxing,
    )
    names = list(PROGRAMS) if options.all else FEW_PROGRAMS
    found: dict[str, Sequence[Cell]] = {}
    began = time.perf_counter()
    _print_machine(options)
    heads = ("predicted", "measured", "spread", "error")
    print("model        layout     {:>10} {:>10} {:>7} {:>7}".format(*heads))
    for name in names:
        found[name] = (
            cells_of(registry, Threads(registry=registry), name, trial)
            if options.boxing == "local"
            else cells_of_processes(name, trial, options.boxing)
        )
        for cell in found[name]:
            print(
                f"{name:12} {cell.layout:10} {format_seconds(cell.predicted_s):>10} "
                f"{format_seconds(cell.measured_s):>10} {cell.spread:7.0%} {cell.error:+7.0%}",
                flush=True,
            )
    if options.json is not None:
        dumped = {name: [asdict(cell) for cell in of] for name, of in found.items()}
        options.json.write_text(json.dumps(dumped, indent=1), encoding="utf-8")
    cells = [cell for of in found.values() for cell in of]
    error = median(abs(cell.error) for cell in cells)
    print("order of layouts, Kendall's rank correlation:")
    for name, of in found.items():
        print(order_line(name, of))
    _print_machine(options)
    print(
        f"median error {error:.0%} of {len(cells)} cells, median correlation "
        f"{median(map(kendall, found.values())):+.2f} of {len(found)} models, "
        f"in {time.perf_counter() - began:.0f} s"
    )


def _print_machine(options: argparse.Namespace) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rates = ", ".join(map(str, options.cluster)) or "declared, cluster=local"
    if options.operators:
        which = "the same plan" if options.operators == "own" else "other layouts"
        rates += f"; operators measured in steps of {which}"
    ranks = "threads" if options.boxing == "local" else f"processes over {options.boxing}"
    busy = f"{os.cpu_count()} cores, load of the last 1, 5 and 15 minutes: {load}"
    print(f"ranks: {ranks}; rates: {rates}; {busy}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=30, help="steps of each cell, >= 2")
    parser.add_argument("--all", action="store_true", help="all models, not five of them")
    parser.add_argument("--cluster", type=Path, nargs="+", default=[], help="of sbp-calibrate")
    parser.add_argument("--operators", choices=("own", "others"), default="")
    parser.add_argument("--boxing", choices=("local", "torch", "mpi"), default="local")
    parser.add_argument("--ranks", type=int, help="only layouts of so many ranks")
    parser.add_argument("--json", type=Path, help="where the cells go, too, by model")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"{options.rounds} rounds have no spread: at least 2")
    return options


if __name__ == "__main__":
    main()
