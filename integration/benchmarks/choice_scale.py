"""Solve choice problems of the size of the IOPDDL contest, made from one of its instances.

`python integration/benchmarks/choice_scale.py [INSTANCE [RECIPE ...]] [--time-limit S]
[--reference] [--write FILE]`; `nox -s benchmarks -- choice_scale` for the default, a generated
transformer instead of an instance. A recipe is `key=value,...` of `Recipe`:

    copies=35,layout=serial      copies follow each other in time; the limit is that of one copy
    copies=35,layout=nested      copy i begins after and ends before copy i - 1; limits add up
    noise=0.3                    multiply costs of nodes and edges by a factor e^(noise * normal)
    links=3                      edges between a copy and the next, with random costs >= 0
    limit=0.5                    from 0, the least feasible limit of one copy, to 1, its own limit
    forbid=0.1                   fraction of forbidden pairs, except in the planted assignment
    dense=0.1                    number of additional random edges, as a fraction of the nodes

The planted assignment joins the best assignments of the copies, so one always exists. The solver is
compared with its cost; without links, in serial layout, no assignment costs less. `--reference`
solves each copy alone with its own costs and without a time limit: in serial layout, the sum of the
bounds is a bound, and the joined assignments are a feasible one.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

import numpy as np

from sbp_planner.choice import (
    ChoiceProblem,
    ChoiceSolution,
    evaluate,
    read_problem,
    solve,
    transformer_problem,
    write_problem,
)

#: Seconds for one copy alone.
COPY_S = 60.0

DEFAULT = ("copies=4,noise=0.3,links=3", "copies=4,layout=nested,noise=0.3,links=3,limit=0.3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parameters of an instance; see the module."""

    copies: int = 1
    layout: str = "serial"
    noise: float = 0.0
    links: int = 0
    limit: float = 1.0
    forbid: float = 0.0
    dense: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Return the recipe of `key=value,...`."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        pairs = [part.split("=", 1) for part in text.split(",") if part]
        return cls(**{key: kinds[key](value) for key, value in pairs})


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem, a feasible assignment, and the single copies."""

    problem: ChoiceProblem
    planted: list[int]
    alone: list[ChoiceProblem]


def least_limit(problem: ChoiceProblem) -> tuple[int, list[int]]:
    """Return the least feasible limit, to a thousandth, and an assignment within it."""
    free = replace(
        problem,
        costs=[np.where(cost < inf, 0.0, inf) for cost in problem.costs],
        edge_costs=[np.where(cost < inf, 0.0, inf) for cost in problem.edge_costs],
    )
    assert problem.usages is not None
    low = evaluate(free, [int(own.argmin()) for own in problem.usages]).peak_usage
    high = int(problem.usage_limit or 0)
    best = list(solve(problem, time_limit_s=COPY_S).assignment or ())
    while high - low > 1e-3 * high:
        middle = (low + high) // 2
        found = solve(replace(free, usage_limit=middle), time_limit_s=COPY_S).assignment
        if found is None:
            low = middle
        else:
            best, high = list(found), evaluate(free, found).peak_usage
    return high, best


def build(problem: ChoiceProblem, recipe: Recipe) -> Instance:
    """Make the instance of a recipe."""
    random = np.random.default_rng(recipe.seed)
    assert problem.intervals is not None and problem.usages is not None
    full = int(problem.usage_limit or 0)
    if recipe.limit < 1:
        least, _ = least_limit(problem)
        problem = replace(problem, usage_limit=least + int(recipe.limit * (full - least)))
    one = solve(problem, time_limit_s=COPY_S).assignment
    assert one is not None
    count, copies = problem.num_nodes, recipe.copies
    span = max(end for _, end in problem.intervals)
    alone, links, tables = [], [], []
    for copy in range(copies):
        alone.append(_perturbed(problem, recipe, random, one))
        extra = recipe.links if copy + 1 < copies else 0
        for number in range(extra + int(recipe.dense * count)):
            to = (copy + 1 if number < extra else int(random.integers(copies))) * count
            u, v = (int(node) for node in random.integers(0, count, 2))
            links.append((copy * count + u, to + v))
            tables.append(_link_table(problem, random, u, v))
    joined = ChoiceProblem(
        costs=[cost for part in alone for cost in part.costs],
        usages=list(problem.usages) * copies,
        intervals=[
            _lifetime(recipe.layout, interval, copy, copies, span)
            for copy in range(copies)
            for interval in problem.intervals
        ],
        edges=[(c * count + u, c * count + v) for c in range(copies) for u, v in problem.edges]
        + links,
        edge_costs=[cost for part in alone for cost in part.edge_costs] + tables,
        name=f"{problem.name} {recipe}",
    )
    planted = list(one) * copies
    limit = evaluate(joined, planted).peak_usage
    if recipe.layout == "serial":
        limit = max(limit, int(problem.usage_limit or 0))
    return Instance(problem=replace(joined, usage_limit=limit), planted=planted, alone=alone)


def _perturbed(
    problem: ChoiceProblem, recipe: Recipe, random: np.random.Generator, planted: tuple[int, ...]
) -> ChoiceProblem:
    costs = [
        np.round(cost * np.exp(recipe.noise * random.standard_normal())) for cost in problem.costs
    ]
    tables = []
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        table = np.round(table * np.exp(recipe.noise * random.standard_normal()))
        if recipe.forbid:
            kept = table[planted[u], planted[v]]
            table[random.random(table.shape) < recipe.forbid] = inf
            table[planted[u], planted[v]] = kept
        tables.append(table)
    return replace(problem, costs=costs, edge_costs=tables)


def _link_table(
    problem: ChoiceProblem, random: np.random.Generator, u: int, v: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return costs of an edge in the scale of the problem's edges; half of them are 0."""
    known = problem.edge_costs[int(random.integers(len(problem.edge_costs)))]
    known = known[known < inf]
    shape = len(problem.costs[u]), len(problem.costs[v])
    table = random.choice(known, shape) if len(known) else np.zeros(shape)
    return np.where(random.random(shape) < 0.5, table, 0.0)


def _lifetime(
    layout: str, interval: tuple[int, int], copy: int, copies: int, span: int
) -> tuple[int, int]:
    start, end = interval
    if start >= end:
        return 0, 0
    if layout == "serial":
        return copy * span + start, copy * span + end
    if layout != "nested":
        raise ValueError(f"the layout is {layout!r}: serial or nested")
    # Intervals that span the middle of a copy reach from its forward to its backward pass.
    middle = span // 2
    begins = copy * middle if start < middle else (2 * copies - 2 - copy) * middle
    ends = copy * middle if end <= middle else (2 * copies - 2 - copy) * middle
    return begins + start, ends + end


def joined_reference(instance: Instance) -> tuple[float, float]:
    """Return a cost of a serial instance, and a lower bound, both from its single copies."""
    found = [solve(part, time_limit_s=COPY_S) for part in instance.alone]
    assignment = [s for part in found for s in part.assignment or ()]
    return evaluate(instance.problem, assignment).cost, sum(part.bound for part in found)


def line(instance: Instance, solution: ChoiceSolution, cpu_s: float) -> str:
    """Return the printed line of a run."""
    planted = evaluate(instance.problem, instance.planted).cost
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"  cost {solution.cost:.12g} bound {solution.bound:.12g} gap {100 * solution.gap:.3f} % "
        f"proved {solution.proved} planted {planted:.12g}; "
        f"{solution.seconds:.1f} s, here {cpu_s:.1f} s of CPU, {memory:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="choice problems of the size of the contest")
    parser.add_argument("instance", nargs="?", type=Path)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--write", type=Path, help="write the instance there, solve nothing")
    options = parser.parse_args()
    source = options.instance
    base = transformer_problem(20, seed=1) if source is None else read_problem(source)
    for recipe in options.recipes or DEFAULT:
        instance = build(base, Recipe.parse(recipe))
        problem = instance.problem
        print(f"{recipe}: {problem.num_nodes} nodes, {len(problem.edges)} edges", flush=True)
        if options.write:
            write_problem(options.write, problem)
            continue
        if options.reference:
            cost, bound = joined_reference(instance)
            print(f"  copies alone: cost {cost:.12g} bound {bound:.12g}", flush=True)
        began = time.process_time()
        solution = solve(
            problem,
            time_limit_s=options.time_limit,
            progress=_report if options.progress else None,
        )
        print(line(instance, solution, time.process_time() - began), flush=True)


def _report(cost: float, bound: float, seconds: float) -> None:
    sys.stderr.write(f"{seconds:8.2f} s  cost {cost:.12g}  bound {bound:.12g}\n")


if __name__ == "__main__":
    main()
