"""The solver of choice problems: reductions, then what fits the size of what is left.

    reduce ──> few pairs left? ──yes──> integer program ──> proved, mostly
                     │ no, or not proved in time
                     v
        messages and prices <──> large neighbourhoods        this process: assignments, bounds
                     │ prune what is in no better assignment
                     v
        reduce further ──> integer program                    a second process: the proof

The second process is begun anew when much more could be pruned. All find assignments for one
record of the best, in terms of the problem as it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.dual import DualAscent
from sbp_planner.choice.graph import Graph, NothingAllowedError
from sbp_planner.choice.neighbourhood import Neighbourhoods
from sbp_planner.choice.problem import ChoiceProblem, Ints, evaluate
from sbp_planner.choice.program import ProgramResult, solve_program
from sbp_planner.choice.reduce import reduce_further, reduce_problem
from sbp_planner.choice.worker import Bound, Task, Values, Worker

#: With at most so many allowed pairs, the integer program comes first.
_FEW_PAIRS = 8_000

#: With at most so many, the second process begins at once.
_SOME_PAIRS = 60_000

#: With more than so many, it is not tried before much of the time is gone.
_MANY_PAIRS = 250_000

#: Part of the time that reductions, the first integer program, and the search before the integer
#: program of a large problem may take.
_REDUCE_PART = 0.5
_FIRST_PART = 0.3
_ALONE_PART = 0.35
_MESSAGES_PART = 0.15

#: Sweeps of messages between two looks at what can be pruned, and at the time.
_SWEEPS = 20

#: The second process begins anew when its problem can be made so much smaller.
_MUCH_SMALLER = 0.6

#: Part of the time, and most seconds, that are kept to finish.
_RESERVE_PART = 0.04
_RESERVE_S = 1.5

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
    record = _Record(problem, time_limit_s, gap, progress)
    if start is not None:
        record.offer([int(strategy) for strategy in start])
    _run(record, start)
    return record.solution()


class _Record:
    """The best assignment and bound so far, of the problem as it was given."""

    def __init__(
        self,
        problem: ChoiceProblem,
        time_limit_s: float,
        gap: float,
        progress: Progress | None,
    ) -> None:
        self.problem = problem
        self.began = time.monotonic()
        self.time_limit_s = time_limit_s
        self.deadline = self.began + time_limit_s - min(_RESERVE_PART * time_limit_s, _RESERVE_S)
        self.gap = gap
        self.progress = progress
        self.best: list[int] | None = None
        self.cost = inf
        self.bound = -inf
        self.proved = False
        self.whole = all(
            bool((table[np.isfinite(table)] % 1 == 0).all())
            for table in (*problem.costs, *problem.edge_costs)
        )

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, or no time to do it."""
        return self.proved or time.monotonic() >= self.deadline

    def after(self, part: float) -> float:
        """Return the moment at which a part of the time that is left now is gone."""
        now = time.monotonic()
        return now + part * max(self.deadline - now, 0.0)

    def offer(self, assignment: list[int]) -> None:
        """Keep an assignment if it is better than the best so far."""
        found = evaluate(self.problem, assignment)
        if found.cost < self.cost:
            self.best, self.cost = assignment, found.cost
            self._report()
            self._compare()

    def prove(self) -> None:
        """Keep that no assignment is better than the best so far, or that there is none."""
        self.proved = True
        if self.cost > self.bound:
            self.bound = self.cost
            self._report()

    def raise_bound(self, bound: float) -> None:
        """Keep a bound if it is higher than the one so far."""
        if self.whole and isfinite(bound):
            # The cost is a whole number, hence at least the next one.
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
        """Return what was found."""
        bound = min(self.bound, self.cost)
        if self.proved and self.best is None:
            bound = inf
        return ChoiceSolution(
            assignment=None if self.best is None else tuple(self.best),
            cost=self.cost,
            bound=bound,
            proved=self.proved,
            seconds=time.monotonic() - self.began,
        )


class _Part:
    """What is left of the problem after some reductions, and how to get back from it."""

    def __init__(self, graph: Graph, record: _Record) -> None:
        self.graph = graph
        self.record = record
        self.compact, self.nodes = compacted(graph)
        self.num_pairs = self.compact.num_arcs

    def offer(self, values: Ints) -> None:
        """Offer an assignment of this part to the record, if it may be better."""
        compact = self.compact
        if compact.total(values) < self.record.cost and compact.fits(values):
            chosen = dict(zip(self.nodes, values.tolist(), strict=True))
            self.record.offer(self.graph.extend(chosen))

    def projected(self, assignment: Sequence[int] | None) -> Ints | None:
        """Return an assignment on what is left, if all its strategies are left and fit."""
        if assignment is None:
            return None
        values = self.graph.project(assignment)
        if any(node not in values for node in self.nodes):
            return None
        found = np.array([values[node] for node in self.nodes], dtype=np.int64)
        allowed = self.compact.total(found) < inf and self.compact.fits(found)
        return found if allowed else None

    def pruned(self, dual: DualAscent) -> _Part:
        """Return the part without what is in no better assignment.

        Raises:
            NothingAllowedError: If there is no better one.
        """
        strategies, pairs = dual.allowed(self.record.cost)
        by_node = dict(zip(self.nodes, strategies, strict=True))
        edges = [(self.nodes[u], self.nodes[v]) for u, v in self.compact.edges]
        by_edge = dict(zip(edges, pairs, strict=True))
        deadline = self.record.after(_FIRST_PART)
        return _Part(reduce_further(self.graph, by_node, by_edge, deadline), self.record)


def _run(record: _Record, start: Sequence[int] | None) -> None:
    """Reduce, solve, and leave what was found in the record."""
    try:
        part = _Part(reduce_problem(record.problem, record.after(_REDUCE_PART)), record)
    except NothingAllowedError:
        record.prove()
        return
    if not part.nodes:
        part.offer(np.zeros(0, dtype=np.int64))
        record.prove()
        return
    begin = part.projected(start)
    if part.num_pairs <= _FEW_PAIRS:
        result = solve_program(
            part.compact,
            record.after(_FIRST_PART),
            record.gap,
            begin,
            on_better=part.offer,
            on_bound=record.raise_bound,
        )
        _note(record, result)
    if not record.done:
        _Loop(record, part, begin).run()


def _note(record: _Record, result: ProgramResult, below: float = inf) -> None:
    """Take in the end of an integer program that has all assignments of cost <= `below`."""
    if result.optimal and record.gap == 0:
        record.prove()
        return
    record.raise_bound(min(result.bound, below))
    if result.optimal:
        record.proved = True


class _Loop:
    """Messages and neighbourhoods here, the integer program in a second process."""

    def __init__(self, record: _Record, part: _Part, begin: Ints | None) -> None:
        self.record = record
        self.part = part
        self.dual = DualAscent(part.compact)
        self.near = Neighbourhoods(part.compact, self.dual.sweep() if begin is None else begin)
        self.alone_until = record.after(_ALONE_PART)
        self.worker: Worker | None = None
        self.worker_part: _Part | None = None
        self.worker_below = inf

    def run(self) -> None:
        """Search until the best is proved or the time is up."""
        try:
            if self.part.num_pairs <= _SOME_PAIRS:
                self._begin_worker(self.part, inf)
            messages_until = self.record.after(_MESSAGES_PART)
            while not self.record.done:
                before = self.record.cost - self.dual.bound
                began = time.monotonic()
                self._pass_messages()
                self._consider_worker()
                self._listen()
                stalled = self.record.cost - self.dual.bound > 0.98 * before < inf
                if stalled or time.monotonic() > messages_until:
                    self._search_near(2 * time.monotonic() - began)
        finally:
            if self.worker is not None:
                self.worker.end()

    def _search_near(self, until: float) -> None:
        """Search large neighbourhoods, one or more."""
        while not self.record.done:
            self.near.step(self.record.deadline)
            self._offer(self.near.values)
            self._listen()
            if time.monotonic() >= until:
                return

    def _offer(self, values: Ints) -> None:
        self.part.offer(values)

    def _pass_messages(self) -> None:
        for _ in range(_SWEEPS):
            if self.record.done:
                return
            values = self.dual.sweep()
            self.record.raise_bound(self.dual.bound)
            self._offer(values)
            self.near.replace_values(values)
            self.dual.move_prices(values, self.record.cost)

    def _consider_worker(self) -> None:
        """Begin the integer program, or begin it anew if its problem can be made much smaller."""
        if self.record.done:
            return
        part, below = self.part, inf
        if self.record.best is not None:
            try:
                self.dual.sweep()
                part, below = self.part.pruned(self.dual), self.record.cost
            except NothingAllowedError:
                self.record.prove()
                return
        late = time.monotonic() >= self.alone_until
        if self.worker_part is None:
            wanted = part.num_pairs <= _MANY_PAIRS or late
        else:
            wanted = part.num_pairs <= _MUCH_SMALLER * self.worker_part.num_pairs
        if wanted:
            self._begin_worker(part, below)

    def _begin_worker(self, part: _Part, below: float) -> None:
        if not part.nodes:
            part.offer(np.zeros(0, dtype=np.int64))
            self.record.prove()
            return
        if self.worker is not None:
            self.worker.end()
        task = Task(
            compact=part.compact,
            seconds=max(self.record.deadline - time.monotonic(), 0.0),
            gap=self.record.gap,
            start=part.projected(self.record.best),
        )
        self.worker, self.worker_part, self.worker_below = Worker(task), part, below

    def _listen(self, wait_s: float = 0.0) -> None:
        """Take in what the second process has found."""
        if self.worker is None or self.worker_part is None:
            return
        for message in self.worker.messages(wait_s):
            if isinstance(message, Values):
                self.worker_part.offer(message.values)
            elif isinstance(message, Bound):
                self.record.raise_bound(min(message.bound, self.worker_below))
            else:
                if message.values is not None:
                    self.worker_part.offer(message.values)
                _note(self.record, message, self.worker_below)
