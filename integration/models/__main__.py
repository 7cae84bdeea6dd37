"""Run the matrix of real models and print it.

python -m models                                   the whole matrix
python -m models --models gpt2,llama --layouts zero3,2-D --dtypes float64 --steps 10
python -m models --boxing torch                    the whole matrix with a process for each rank
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from rich.console import Console

from models.layouts import LAYOUTS
from models.programs import PROGRAMS
from models.ranks import attempt_on_ranks
from models.table import matrix
from models.trial import TOLERANCES, Outcome, attempt


def main() -> int:
    """Run the requested cells; return 1 if a cell failed."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 200)
    logging.basicConfig(level=logging.WARNING)
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    for dtype in options.dtypes:
        cells = [(name, layout, dtype) for name in options.models for layout in options.layouts]
        whys = {cell: LAYOUTS[cell[1]].fits(PROGRAMS[cell[0]]) for cell in cells}
        fitting = [cell for cell in cells if not whys[cell]]
        if options.boxing == "local":
            found = (attempt(*cell, options.steps) for cell in fitting)
        else:
            found = attempt_on_ranks(fitting, options.boxing, options.steps)
        for cell in found:
            outcomes.append(cell)
            _print_line(console, cell)
        outcomes += [
            Outcome(program=name, layout=layout, dtype=dtype, error=why)
            for (name, layout, _), why in whys.items()
            if why
        ]
        console.print(matrix(outcomes, dtype))
    failed = [o for o in outcomes if not o.passed and not o.error.startswith("no ")]
    ran = [o for o in outcomes if not o.error.startswith("no ")]
    console.print(
        f"{len(ran) - len(failed)} of {len(ran)} cells hold, {options.steps} steps each, "
        f"in {time.perf_counter() - began:.0f} s"
    )
    return 1 if failed else 0


def _print_line(console: Console, cell: Outcome) -> None:
    name = f"{cell.program:10} {cell.layout:10} {cell.dtype:8}"
    if cell.error:
        console.print(f"{name} {cell.error}", style="red", markup=False)
        return
    memory = f"memory {cell.memory_error:.1%}" if cell.peaks else "memory not measured"
    console.print(
        f"{name} {'holds' if cell.passed else 'DOES NOT HOLD'}: loss {cell.loss_error:.1e}, shards "
        f"{cell.state_error:.1e}, {cell.counted_bytes} of {cell.predicted_bytes} B moved, "
        f"{memory}; compiled in {cell.compile_s:.1f} s, run in {cell.run_s:.1f} s",
        highlight=False,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="models", description=__doc__)
    for option, known in (
        ("models", PROGRAMS),
        ("layouts", LAYOUTS),
        ("dtypes", TOLERANCES),
    ):
        parser.add_argument(
            f"--{option}",
            type=lambda text, known=known: _chosen(text, known),
            default=list(known),
            help=f"some of {', '.join(known)}, with commas between",
        )
    parser.add_argument(
        "--boxing",
        choices=("local", "torch", "mpi"),
        default="local",
        help="ranks are threads (local), or processes",
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each cell")
    return parser.parse_args()


def _chosen(text: str, known: object) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]  # type: ignore[operator]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")  # type: ignore[arg-type]
    return names


if __name__ == "__main__":
    sys.exit(main())
