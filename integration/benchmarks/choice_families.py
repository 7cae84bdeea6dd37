"""Solve choice problems of many structures, and compare with HiGHS alone in the same time.

`python integration/benchmarks/choice_families.py [FAMILY[,KEY=VALUE ...] ...] [--time-limit S]`;
`nox -s benchmarks -- choice_families`. A family is one of `sbp_planner.choice.FAMILIES`, or the
path of a file of the contest; keys are those of `Shape`, and `seed`.

Each problem has a planted assignment. The peer is `scipy.optimize.milp` on the whole problem in arc
form, with all of its memory rows. The exit status is 1 if no assignment is found, or if it costs
more than the peer's.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from sbp_planner.choice import (
    FAMILIES,
    ChoiceProblem,
    Shape,
    evaluate,
    memory_rows,
    planted_problem,
    read_problem,
    solve,
)

#: The largest cost or size in bytes in a problem for HiGHS; larger ones are scaled.
LARGEST = 1e6


@dataclass(slots=True)
class Equations:
    """Rows of a sparse matrix, with their bounds."""

    rows: list[np.ndarray]
    columns: list[np.ndarray]
    entries: list[np.ndarray]
    low: list[float]
    high: list[float]

    def add(self, row: np.ndarray, columns: np.ndarray, entries: np.ndarray) -> None:
        """Add entries to rows, counted from the next one."""
        self.rows.append(len(self.low) + row)
        self.columns.append(columns)
        self.entries.append(entries)

    def close(self, count: int, low: float, high: float) -> None:
        """Complete a number of rows."""
        self.low += [low] * count
        self.high += [high] * count


def by_highs(problem: ChoiceProblem, seconds: float) -> list[int] | None:
    """Return the best assignment of HiGHS, None if it found none."""
    first = np.concatenate([[0], np.cumsum(problem.sizes)])
    costs, count = [np.concatenate(problem.costs)], int(first[-1])
    system, columns = Equations([], [], [], [], []), count
    for node, size in enumerate(problem.sizes):
        own = np.arange(first[node], first[node + 1])
        system.add(np.zeros(size, dtype=int), own, np.ones(size))
        system.close(1, 1.0, 1.0)
    for edge, table in zip(problem.edges, problem.edge_costs, strict=True):
        places = np.nonzero(table < inf)
        arcs = np.arange(columns, columns + len(places[0]))
        columns += len(arcs)
        costs.append(table[places])
        for node, place in zip(edge, places, strict=True):
            size = problem.sizes[node]
            own = np.arange(first[node], first[node + 1])
            system.add(place, arcs, np.ones(len(arcs)))
            system.add(np.arange(size), own, -np.ones(size))
            system.close(size, 0.0, 0.0)
    _add_memory(problem, system, first)
    cost = np.concatenate(costs)
    allowed = cost < inf
    finite = np.where(allowed, cost, 0.0)
    matrix = sparse.csr_array(
        (
            np.concatenate(system.entries),
            (np.concatenate(system.rows), np.concatenate(system.columns)),
        ),
        shape=(len(system.low), columns),
    )
    found = milp(
        finite / max(np.abs(finite).max() / LARGEST, 1e-300),
        integrality=(np.arange(columns) < count).astype(int),
        bounds=Bounds(np.zeros(columns), allowed.astype(float)),
        constraints=LinearConstraint(matrix, np.array(system.low), np.array(system.high)),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return [int(found.x[a:b].argmax()) for a, b in pairwise(first)]


def _add_memory(problem: ChoiceProblem, system: Equations, first: np.ndarray) -> None:
    if problem.usages is None or problem.usage_limit is None or problem.intervals is None:
        return
    times, spans = memory_rows(problem.intervals)
    unit = max(problem.usage_limit / LARGEST, 1.0)
    for node, (begin, end) in enumerate(spans.tolist()):
        own = np.arange(first[node], first[node + 1])
        count = max(end - begin, 0)
        system.add(
            np.repeat(np.arange(begin, begin + count), len(own)),
            np.tile(own, count),
            np.tile(problem.usages[node] / unit, count),
        )
    system.close(len(times), -inf, problem.usage_limit / unit)


def made(text: str) -> tuple[ChoiceProblem, float]:
    """Return the problem of a word of the command line, and a known cost."""
    name, *settings = text.split(",")
    if name not in FAMILIES:
        return read_problem(Path(name)), inf
    given = dict(part.split("=", 1) for part in settings)
    seed = int(given.pop("seed", 0))
    kinds = {field.name: type(getattr(FAMILIES[name], field.name)) for field in fields(Shape)}
    shape = replace(FAMILIES[name], **{key: kinds[key](value) for key, value in given.items()})
    problem, planted = planted_problem(shape, seed)
    return problem, evaluate(problem, planted).cost


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    ours, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return ours.ru_utime + ours.ru_stime + theirs.ru_utime + theirs.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description="choice problems of many structures, and HiGHS")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument(
        "--cpu", action="store_true", help="ours has SECONDS of CPU of this process, not of time"
    )
    options = parser.parse_args()
    if options.cpu:
        # CPU time excludes the load of the machine; the limits of HiGHS are still wall time.
        time.monotonic = time.process_time
    worse = 0
    for text in options.families:
        problem, known = made(text)
        print(f"{text}: {problem.num_nodes} nodes, {len(problem.edges)} edges", flush=True)
        told: list[float] = []
        cpu, began = cpu_s(), time.monotonic()
        solution = solve(
            problem,
            time_limit_s=options.time_limit,
            progress=lambda cost, _, seconds, told=told: told.append(seconds) if cost < inf else 0,
        )
        print(
            f"  ours {solution.cost:.12g}, bound {solution.bound:.12g}, gap "
            f"{100 * solution.gap:.2f} %, planted {known:.12g}; {time.monotonic() - began:.1f} s, "
            f"{cpu_s() - cpu:.1f} s of CPU, the first after {min(told, default=inf):.1f} s",
            flush=True,
        )
        least = known
        if not options.alone:
            cpu, began = cpu_s(), time.monotonic()
            found = by_highs(problem, options.time_limit)
            cost = evaluate(problem, found).cost if found is not None else inf
            took = f"{time.monotonic() - began:.1f} s, {cpu_s() - cpu:.1f} s of CPU"
            print(f"  HiGHS {cost:.12g}; {took}", flush=True)
            least = min(least, cost)
        worse += solution.cost > least * (1 + 1e-9)
    if worse:
        print(f"{worse} cost more than what is known")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
