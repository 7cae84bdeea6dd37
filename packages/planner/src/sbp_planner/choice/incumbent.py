"""`Record`: keeps the best assignment and lower bound that the solver of choice problems has found.

An assignment gives each node of the problem a strategy. All methods of `solver` share the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import numpy as np

from sbp_planner.choice.problem import ChoiceProblem, evaluate

#: Part of the time, and most seconds, that are reserved for finishing.
_RESERVE_PART = 0.06
_RESERVE_S = 4.0

#: Called with (cost of the best assignment so far, lower bound so far, seconds since the start).
Progress = Callable[[float, float, float], None]

#: Called with each better assignment, the strategy index of each node.
OnBetter = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSolution:
    """The result of the solver.

    Args:
        assignment: The strategy index of each node; None if none that is allowed and fits was
            found (`proved` then means that there is none).
        cost: Cost of the assignment, exactly as in `evaluate`; `inf` without one.
        bound: No allowed assignment costs less; `inf` if there is none, `-inf` if nothing is known.
        proved: Whether the assignment is proved to be the best one, within the requested gap; or,
            without one, that there is none.
        seconds: Seconds that it took.
    """

    assignment: tuple[int, ...] | None
    cost: float
    bound: float
    proved: bool
    seconds: float

    @property
    def gap(self) -> float:
        """How far the assignment may be above the best one, as a part of its cost, or `inf`."""
        if self.cost <= self.bound:
            return 0.0
        if not isfinite(self.cost) or not isfinite(self.bound):
            return inf
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)

    @property
    def infeasible(self) -> bool:
        """Whether it is proved that no assignment is allowed and fits."""
        return self.assignment is None and self.proved


class Record:
    """The best assignment and bound so far, in terms of the original problem."""

    def __init__(
        self,
        problem: ChoiceProblem,
        time_limit_s: float,
        gap: float,
        progress: Progress | None,
        keep: OnBetter | None = None,
    ) -> None:
        self.problem = problem
        self.began = time.monotonic()
        self.time_limit_s = time_limit_s
        self.deadline = self.began + time_limit_s - min(_RESERVE_PART * time_limit_s, _RESERVE_S)
        self.gap = gap
        self.progress = progress
        self.keep = keep
        self.best: list[int] | None = None
        self.cost = inf
        self.bound = -inf
        self.proved = False
        tables = [table.ravel() for table in (*problem.costs, *problem.edge_costs)]
        every = np.concatenate(tables) if tables else np.zeros(0)
        self.has_integer_costs = bool((every[every < inf] % 1 == 0).all())

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, or no time for it."""
        return self.proved or time.monotonic() >= self.deadline

    def after(self, part: float) -> float:
        """Return the time at which a part of the remaining time will have passed."""
        now = time.monotonic()
        return now + part * max(self.deadline - now, 0.0)

    def offer(self, assignment: list[int]) -> None:
        """Keep an assignment if it is better than the best so far."""
        found = evaluate(self.problem, assignment)
        if found.cost < self.cost:
            self.best, self.cost = assignment, found.cost
            if self.keep is not None:
                self.keep(assignment)
            self._report()
            self._compare()

    def prove(self) -> None:
        """Record that no assignment is better than the best so far, or that there is none."""
        self.proved = True
        if self.cost > self.bound:
            self.bound = self.cost
            self._report()

    def raise_bound(self, bound: float) -> None:
        """Keep a bound if it is higher than the one so far."""
        if self.has_integer_costs and isfinite(bound):
            # The cost is a whole number, so the bound is at least the next one.
            bound = float(ceil(bound - 1e-9 * max(1.0, abs(bound))))
        if bound > self.bound:
            self.bound = bound
            self._report()
            self._compare()

    def _compare(self) -> None:
        if self.best is not None and self.cost - self.bound <= self.gap * abs(self.cost):
            self.proved = True

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.cost, min(self.bound, self.cost), time.monotonic() - self.began)

    def solution(self) -> ChoiceSolution:
        """Return the result so far."""
        return ChoiceSolution(
            assignment=None if self.best is None else tuple(self.best),
            cost=self.cost,
            bound=inf if self.proved and self.best is None else min(self.bound, self.cost),
            proved=self.proved,
            seconds=time.monotonic() - self.began,
        )
