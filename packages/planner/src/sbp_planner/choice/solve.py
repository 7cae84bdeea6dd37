"""The solver of choice problems: reductions, then what fits the size of what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.compact import Compact, compacted
from sbp_planner.choice.graph import Graph, NothingAllowedError
from sbp_planner.choice.problem import ChoiceProblem, Ints, evaluate
from sbp_planner.choice.program import solve_program
from sbp_planner.choice.reduce import reduce_problem

#: Told (cost of the best assignment so far, lower bound so far, seconds since the start).
Progress = Callable[[float, float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSolution:
    """What was found.

    Args:
        assignment: The strategy index of each node; None if none that is allowed and fits was
            found (`proved` then says whether there is none at all).
        cost: Of the assignment, exactly as `evaluate` has it; `inf` without one.
        bound: No allowed assignment costs less; `inf` if there is none, `-inf` if nothing is known.
        proved: Whether the assignment is proved to be the best one, within the gap asked for; or,
            without one, that there is none.
        seconds: Taken, in s.
    """

    assignment: tuple[int, ...] | None
    cost: float
    bound: float
    proved: bool
    seconds: float

    @property
    def gap(self) -> float:
        """By which part of its cost the assignment may be above the best one; `inf` if unknown."""
        if self.cost <= self.bound:
            return 0.0
        if not isfinite(self.cost) or not isfinite(self.bound):
            return inf
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that no assignment is allowed and fits."""
        return self.assignment is None and self.proved


def solve(
    problem: ChoiceProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    start: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> ChoiceSolution:
    """Return the best assignment that is found in time, and a bound.

    Args:
        problem: What to choose.
        time_limit_s: Seconds after which the best so far is returned, > 0.
        gap: Stop when the assignment is proved to be within this part of the best one, >= 0.
        start: An assignment to begin with, feasible or not; the result is never worse.
        progress: Told of each better assignment and bound.

    Raises:
        SbpValueError: If a setting is out of range, or `start` is no assignment.
    """
    if not time_limit_s > 0 or not gap >= 0:
        raise SbpValueError(
            f"time_limit_s is {time_limit_s} and gap {gap}",
            where=problem.name,
            accepted="seconds > 0, and a part >= 0",
        )
    search = _Search(problem, time_limit_s, gap, progress)
    if start is not None:
        search.offer([int(strategy) for strategy in start])
    return search.run(start)


class _Search:
    def __init__(
        self,
        problem: ChoiceProblem,
        time_limit_s: float,
        gap: float,
        progress: Progress | None,
    ) -> None:
        self.problem = problem
        self.began = time.monotonic()
        self.deadline = self.began + time_limit_s
        self.gap = gap
        self.progress = progress
        self.best: list[int] | None = None
        self.cost = inf
        self.bound = -inf
        self.whole = all(
            bool((table[np.isfinite(table)] % 1 == 0).all())
            for table in (*problem.costs, *problem.edge_costs)
        )

    def run(self, start: Sequence[int] | None) -> ChoiceSolution:
        """Reduce, solve, and say what was found."""
        try:
            left = self.deadline - time.monotonic()
            graph = reduce_problem(self.problem, time.monotonic() + 0.5 * left)
        except NothingAllowedError:
            return self._solution(proved=self.best is None)
        compact, nodes = compacted(graph)

        def offer(values: Ints) -> None:
            self.offer(graph.extend(dict(zip(nodes, values.tolist(), strict=True))))

        if not nodes:
            offer(np.zeros(0, dtype=np.int64))
            return self._solution(proved=True)
        begin = _projected(graph, compact, nodes, start)
        result = solve_program(
            compact, self.deadline, self.gap, begin, on_better=offer, on_bound=self.raise_bound
        )
        self.raise_bound(result.bound)
        return self._solution(proved=result.optimal)

    def offer(self, assignment: list[int]) -> None:
        """Keep an assignment if it is better than the best so far."""
        found = evaluate(self.problem, assignment)
        if found.cost < self.cost:
            self.best, self.cost = assignment, found.cost
            self._report()

    def raise_bound(self, bound: float) -> None:
        """Keep a bound if it is higher than the one so far."""
        if self.whole and isfinite(bound):
            # The cost is a whole number, so that no bound between two of them is tight.
            bound = float(ceil(bound - 1e-6))
        if bound > self.bound:
            self.bound = bound
            self._report()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.cost, min(self.bound, self.cost), time.monotonic() - self.began)

    def _solution(self, proved: bool) -> ChoiceSolution:
        bound = min(self.bound, self.cost)
        if proved and self.best is None:
            bound = inf
        elif proved and self.gap == 0:
            bound = self.cost
        return ChoiceSolution(
            assignment=None if self.best is None else tuple(self.best),
            cost=self.cost,
            bound=bound,
            proved=proved or self.cost <= bound,
            seconds=time.monotonic() - self.began,
        )


def _projected(
    graph: Graph, compact: Compact, nodes: list[int], start: Sequence[int] | None
) -> Ints | None:
    """Return a start on the nodes that are left, if all their strategies are."""
    if start is None:
        return None
    values = graph.project(start)
    if any(node not in values for node in nodes):
        return None
    found = np.array([values[node] for node in nodes], dtype=np.int64)
    return found if compact.total(found) < inf and compact.fits(found) else None
