"""Solve a choice problem: give each operator of a step a strategy, at least cost, within memory.

The problem is reduced first; the size of the rest decides the method.

    reduce ──> no memory left, narrow graph? ──yes──> elimination ──> proved
                     │ no
               few pairs left? ──yes──> integer program ──> proved, mostly
                     │ no, or not proved in time
                     v
                  search: messages, neighbourhoods, pruning, the program next to them (`large`)

All methods share one record of the best assignment, in terms of the original problem.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import SbpValueError
from sbp_core.infer import Buckets, Factor, minimise
from sbp_planner.choice.compact import Compact
from sbp_planner.choice.incumbent import ChoiceSolution, OnBetter, Progress, Record
from sbp_planner.choice.large.large_search import LargeSearch
from sbp_planner.choice.problem import ChoiceProblem, Floats, Ints
from sbp_planner.choice.program import solve_program
from sbp_planner.choice.reduce import reduce_problem
from sbp_planner.choice.reduced_graph import NothingAllowedError
from sbp_planner.choice.remaining_problem import RemainingProblem

#: With at most so many allowed pairs, the integer program comes first.
_FEW_PAIRS = 50_000

#: Parts of the time for the reductions, and for the first integer program; its most seconds:
#: problems that are not proved by then are better searched next to it.
_REDUCE_PART = 0.4
_FIRST_PART = 0.4
_FIRST_S = 20.0

#: Most entries of one table of an elimination, and of all: some seconds of work.
_MAX_ENTRIES = 1 << 20
_MAX_TOTAL_ENTRIES = 1 << 25

#: Seconds for each pair, and the largest part of the time, for finding an assignment before that
#: program.
_BEGIN_S = 1e-5
_BEGIN_PART = 0.1


def solve(
    problem: ChoiceProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    start: Sequence[int] | None = None,
    progress: Progress | None = None,
    keep: OnBetter | None = None,
) -> ChoiceSolution:
    """Return the best assignment that is found in time, and a bound.

    Args:
        problem: The problem.
        time_limit_s: Seconds after which the best assignment so far is returned, > 0.
        gap: Stop when the assignment is proved to be within this part of the best one, >= 0.
        start: An assignment to begin with, feasible or not; the result is never worse.
        progress: Called with each better cost and bound.
        keep: Called with each better assignment, for callers that may be stopped at any moment.

    Raises:
        SbpValueError: If a setting is out of range, or `start` is no assignment.
    """
    if not time_limit_s > 0 or not gap >= 0:
        raise SbpValueError(
            f"time_limit_s is {time_limit_s} and gap {gap}",
            where=problem.name,
            accepted="seconds > 0, and a part >= 0",
        )
    record = Record(problem, time_limit_s, gap, progress, keep)
    if start is not None:
        record.offer([int(strategy) for strategy in start])
    try:
        part = RemainingProblem(reduce_problem(problem, record.after(_REDUCE_PART)), record)
    except NothingAllowedError:
        record.prove()
        return record.solution()
    values = eliminated(part.compact) if part.nodes else np.zeros(0, dtype=np.int64)
    if values is not None:
        part.offer(values)
        record.prove()
        return record.solution()
    search = LargeSearch(record, part, part.projected(start))
    if part.num_pairs <= _FEW_PAIRS:
        # An assignment first, because the program may find its first one late.
        now = time.monotonic()
        search.begin(min(now + _BEGIN_S * part.num_pairs, record.after(_BEGIN_PART)))
        if record.done:
            return record.solution()
        result = solve_program(
            part.compact,
            min(record.after(_FIRST_PART), time.monotonic() + _FIRST_S),
            record.gap,
            part.projected(record.best),
            on_better=part.offer,
            on_bound=record.raise_bound,
        )
        record.raise_bound(result.bound)
        if result.optimal and record.gap == 0:
            # HiGHS proves up to its tolerance; the remaining difference is no cost.
            record.prove()
        record.proved = record.proved or result.optimal
    if not record.done:
        search.run()
    return record.solution()


def eliminated(compact: Compact) -> Ints | None:
    """Return the best strategies, int64; None if there is memory or the graph is too wide.

    The width is found before: nodes are eliminated symbolically, the one with the smallest table
    first, and the entries of all tables are counted.

        o--o--o--o        a ladder: each table is over three nodes, whatever the length
        |  |  |  |
        o--o--o--o
    """
    if len(compact.capacity):
        return None
    sizes = compact.sizes.tolist()
    factors = [
        Factor((node,), cost)
        for node, cost in enumerate(np.split(compact.cost, compact.first[1:-1]))
    ]
    factors += map(Factor, compact.edges, compact.tables)
    paper, total = _OnPaper(sizes, factors), 0

    def visit(node: int, entries: int) -> set[int] | None:
        nonlocal total
        total += entries
        is_small = entries <= _MAX_ENTRIES and total <= _MAX_TOTAL_ENTRIES
        return paper.eliminate(node) if is_small else None

    paper.smallest_first(visit)
    if paper.left:
        return None
    found = minimise(sizes, factors, [0] * len(sizes), max_entries=_MAX_ENTRIES, max_rounds=1)
    return np.asarray(found.values, dtype=np.int64) if found.exact else None


class _OnPaper(Buckets):
    """An elimination without table contents, only to count entries."""

    def least(
        self, factors: Sequence[Factor], order: tuple[int, ...]
    ) -> tuple[NDArray[np.int32], Floats]:
        """Return tables of the right shape."""
        shape = [self.sizes[v] for v in order[:-1]]
        return np.broadcast_to(np.int32(0), shape), np.broadcast_to(0.0, shape)
