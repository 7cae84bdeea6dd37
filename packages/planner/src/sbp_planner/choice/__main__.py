"""Solve an instance of the IOPDDL contest.

    python -m sbp_planner.choice instance.json[.gz] --time-limit 60 --out assignment.json

Prints cost, bound, gap, seconds, and whether the cost is proved; each better cost or bound is a
line on stderr. Exits with 0 if an assignment was found, 1 if there is none or none was found, 2 if
the input cannot be meant.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sbp_core.errors import SbpError
from sbp_planner.choice.iopddl import read_problem, write_assignment
from sbp_planner.choice.record import ChoiceSolution
from sbp_planner.choice.solver import solve

#: Seconds of the limit that are kept for starting Python and writing the answer.
_RESERVE_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m sbp_planner.choice", description="Solve an instance of the IOPDDL contest."
    )
    parser.add_argument("instance", type=Path, help="a .json or .json.gz file")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--gap", type=float, default=0.0, help="stop within this part of the best")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the assignment")
    options = parser.parse_args(arguments)
    if not options.time_limit > 0 or not options.gap >= 0:
        parser.error("--time-limit must be above 0, and --gap not below")
    try:
        problem = read_problem(options.instance)
        left = options.time_limit - (time.monotonic() - began)
        solution = solve(
            problem,
            time_limit_s=max(left - min(_RESERVE_S, 0.1 * left), 1e-3),
            gap=options.gap,
            progress=_report,
        )
        if options.out is not None and solution.assignment is not None:
            write_assignment(options.out, solution.assignment)
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(_lines(solution, time.monotonic() - began)) + "\n")
    return 0 if solution.assignment is not None else 1


def _report(cost: float, bound: float, seconds: float) -> None:
    words = f"{seconds:8.2f} s  cost {_number(cost)}  bound {_number(bound)}"
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _lines(solution: ChoiceSolution, seconds: float) -> list[str]:
    if solution.assignment is None:
        found = "infeasible" if solution.proved else "nothing found"
        return [f"cost {found}", f"bound {_number(solution.bound)}", f"seconds {seconds:.2f}"]
    return [
        f"cost {_number(solution.cost)}",
        f"bound {_number(solution.bound)}",
        f"gap {solution.gap:.6g}",
        f"seconds {seconds:.2f}",
        f"proved {'yes' if solution.proved else 'no'}",
    ]


def _number(value: float) -> str:
    """Return whole numbers with all their digits."""
    return str(int(value)) if value % 1 == 0 else repr(value)


if __name__ == "__main__":
    sys.exit(main())
