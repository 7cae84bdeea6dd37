"""Solve a choice problem (a strategy for each node at least cost) as an integer program, by HiGHS.

    s[i, k]       1 if node i takes strategy k                               binary
    e[uv, k, l]   1 if u takes k and v takes l; only for allowed pairs       in [0, 1]

    minimise    sum cost[i, k] s[i, k] + sum table_uv[k, l] e[uv, k, l]
    such that   sum_k s[i, k] = 1                    for each node i
                sum_l e[uv, k, l] = s[u, k]          for each edge uv and strategy k of u
                sum_k e[uv, k, l] = s[v, l]          for each edge uv and strategy l of v
                sum bytes_t[i, k] s[i, k] <= capacity_t       for each memory row t

The sums over e (the *arc form*, or local polytope) give much better bounds than e >= s[u] + s[v] -
1, and make e integral where s is. Forbidden pairs have no e. There are many memory rows, and few of
them bind. So the program begins with none, and rows that its solution exceeds are added until it
exceeds none. The linear relaxation is solved first in this way, then the program with these rows. A
bound without some rows is still a bound.

If no assignment that fits is known, the program may be *elastic*: capacity_t (1 + z) replaces
capacity_t, for one z >= 0 that costs far more than all else.

Costs are scaled to 10^6 at most. A row of bytes is divided by the greatest common divisor of its
bytes; its capacity is rounded down.

Source: Wainwright and Jordan, "Graphical models, exponential families, and variational inference",
2008, section 4.1 (local polytope); Zheng et al., OSDI 2022, section 4.2 (the program with e
linearised in another way).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import highspy
import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Floats, Ints

#: The largest cost in HiGHS, whose tolerances are absolute, 1e-7 to 1e-6.
_LARGEST_COST = 1e6

#: How many memory rows are added at a time, at most.
_ROWS_A_ROUND = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The result of HiGHS.

    Args:
        values: Strategy of each node, int64; None if none was found.
        bound: No allowed assignment costs less; `inf` if there is none.
        optimal: Whether the values are proved to be the best up to the gap (or, without values,
            that there are none).
    """

    values: Ints | None
    bound: float
    optimal: bool


def solve_program(
    compact: Compact,
    deadline: float,
    gap: float = 0.0,
    start: Ints | None = None,
    on_better: Callable[[Ints], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
    elastic: bool = False,
    rows: Sequence[int] = (),
) -> ProgramResult:
    """Solve the integer program.

    Args:
        compact: The problem.
        deadline: Time of `time.monotonic`, in s.
        gap: Relative gap at which to stop.
        start: An allowed assignment that fits, to begin with.
        on_better: Called with assignments that fit, as they are found.
        on_bound: Called with lower bounds, as they are found.
        elastic: Whether an assignment may exceed capacities, by the least possible amount. The
            values are then the last ones found, and the bound means nothing.
        rows: Memory rows that will probably bind, to begin with.
    """
    program = _Program(compact, deadline, gap, on_better, on_bound, elastic)
    for row in rows:
        program.add_row(row)
    return program.solve(start)


class _Program:
    def __init__(
        self,
        compact: Compact,
        deadline: float,
        gap: float,
        on_better: Callable[[Ints], None] | None,
        on_bound: Callable[[float], None] | None,
        elastic: bool,
    ) -> None:
        self.compact = compact
        self.deadline = deadline
        self.gap = gap
        self.on_better = on_better
        self.on_bound = on_bound
        self.elastic = elastic
        self.bound = -inf
        self.best: Ints | None = None
        self.best_cost = inf
        self.rows: set[int] = set()
        costs = [compact.cost, *(table[table < inf] for table in compact.tables)]
        cost = np.concatenate(costs)
        largest = float(np.abs(cost).max()) if len(cost) else 0.0
        self.scale = (1.0 if elastic else _LARGEST_COST) / largest if largest > 0 else 1.0
        self.model = self._model(cost * self.scale)
        self.num_columns = len(cost)
        if elastic:
            # z is the last column; its rows are added later.
            self.model.addCol(_LARGEST_COST, 0.0, highspy.kHighsInf, 0, [], [])

    def solve(self, start: Ints | None) -> ProgramResult:
        if start is not None:
            self._offer(start)
        # First the linear relaxation, with the memory rows that it exceeds.
        while True:
            status = self._run()
            if status == highspy.HighsModelStatus.kInfeasible:
                return self._result(inf)
            if status != highspy.HighsModelStatus.kOptimal:
                return self._result(self.bound)
            self._note_bound(self.model.getInfo().objective_function_value)
            weight = np.asarray(self.model.getSolution().col_value)[: len(self.compact.cost)]
            self._offer(self._rounded(weight))
            excess = self.compact.profile(weight) - self.compact.capacity
            slack = 1e-6 * np.maximum(self.compact.capacity, 1)
            if not self._add_rows(np.where(excess > slack, excess, 0)):
                break
        count = len(self.compact.cost)
        kinds = np.full(count, highspy.HighsVarType.kInteger)
        self.model.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kinds)
        while True:
            if self.best is not None:
                self._set_start(self.best)
            status = self._run()
            if status == highspy.HighsModelStatus.kInfeasible:
                return self._result(inf)
            info = self.model.getInfo()
            self._note_bound(info.mip_dual_bound)
            found = None
            if info.primal_solution_status == 2:
                found = self._rounded(np.asarray(self.model.getSolution().col_value))
            if found is not None:
                self._offer(found)
            if status != highspy.HighsModelStatus.kOptimal or found is None:
                return self._result(self.bound)
            if self.compact.fits(found):
                return self._result(self.bound, optimal=True)
            if self.elastic:
                self.best = found
            if not self._add_rows(self.compact.excess(found)):
                # Within the tolerance of HiGHS, but not exactly: all rows are present already.
                return self._result(self.bound)

    def _result(self, bound: float, optimal: bool = False) -> ProgramResult:
        optimal = optimal or (bound == inf and self.best is None)
        if bound == inf and self.best is not None:
            bound, optimal = self.best_cost, True
        return ProgramResult(values=self.best, bound=bound, optimal=optimal)

    def _offer(self, values: Ints) -> None:
        if self.elastic and self.best is None:
            self.best = values
        cost = self.compact.total(values)
        if cost < self.best_cost and self.compact.fits(values):
            self.best, self.best_cost = values, cost
            if self.on_better is not None:
                self.on_better(values)

    def _note_bound(self, objective: float) -> None:
        # HiGHS is exact up to its tolerance, so 1e-7 of the scale is subtracted.
        bound = (objective - 1e-7 * max(1.0, abs(objective))) / self.scale + self.compact.constant
        if bound > self.bound and abs(objective) < highspy.kHighsInf:
            self.bound = bound
            if self.on_bound is not None:
                self.on_bound(bound)

    def _rounded(self, weight: Floats) -> Ints:
        first = self.compact.first
        return np.array(
            [int(weight[a:b].argmax()) for a, b in pairwise(first.tolist())], dtype=np.int64
        )

    def _set_start(self, values: Ints) -> None:
        solution = highspy.HighsSolution()
        column = np.zeros(self.num_columns)
        column[self.compact.first[:-1] + values] = 1.0
        at = len(self.compact.cost)
        for (u, v), table in zip(self.compact.edges, self.compact.tables, strict=True):
            allowed = table < inf
            place = np.cumsum(allowed).reshape(table.shape)[values[u], values[v]]
            column[at + place - 1] = 1.0
            at += int(allowed.sum())
        solution.col_value = column
        self.model.setSolution(solution)

    def _run(self) -> Any:
        """Run HiGHS until it ends or the time is up, and return the status of the model."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return highspy.HighsModelStatus.kTimeLimit
        self.model.setOptionValue("time_limit", self.model.getRunTime() + left)
        self.model.run()
        return self.model.getModelStatus()

    def _add_rows(self, excess: Floats | Ints) -> bool:
        """Add the missing memory rows that are most above capacity; return whether any."""
        over = np.flatnonzero(excess > 0)
        over = over[np.argsort(-excess[over], kind="stable")]
        # Neighbours in time are similar: of each stretch above capacity, the worst row first.
        around = np.concatenate([[-inf], excess, [-inf]])
        is_peak = (around[:-2] <= excess) & (excess > around[2:])
        worst = [*over[is_peak[over]].tolist(), *over.tolist()]
        chosen = [row for row in dict.fromkeys(worst) if row not in self.rows]
        for row in chosen[:_ROWS_A_ROUND]:
            self.add_row(row)
        return bool(chosen)

    def add_row(self, row: int) -> None:
        """Add a memory row that is missing."""
        compact = self.compact
        live = (compact.held_first <= row) & (row < compact.held_end)
        held = np.zeros(len(compact.cost), dtype=np.int64)
        np.add.at(held, compact.held_column[live], compact.held_bytes[live])
        columns = np.flatnonzero(held)
        if not len(columns) and compact.capacity[row] >= 0:
            return
        unit = max(int(np.gcd.reduce(held[columns])), 1)
        held, capacity = held[columns] // unit, int(compact.capacity[row]) // unit
        scale = min(1.0, _LARGEST_COST / int(held.max(initial=1)))
        entries = held * scale
        if self.elastic:
            columns = np.append(columns, self.num_columns)
            entries = np.append(entries, -max(abs(capacity) * scale, 1.0))
        self.model.addRow(
            -highspy.kHighsInf, capacity * scale, len(columns), columns.astype(np.int32), entries
        )
        self.rows.add(row)

    def _model(self, cost: Floats) -> Any:
        """Return a HiGHS model of the equations, its columns in [0, 1]."""
        compact, sizes, count = self.compact, self.compact.sizes, len(self.compact.cost)
        rows, columns = [np.repeat(np.arange(compact.num_nodes), sizes)], [np.arange(count)]
        entries, row, column = [np.ones(count)], compact.num_nodes, count
        for (u, v), table in zip(compact.edges, compact.tables, strict=True):
            ours, theirs = np.nonzero(table < inf)
            arcs = np.arange(column, column + len(ours))
            height, width = table.shape
            rows += [row + ours, row + height + theirs, np.arange(row, row + height + width)]
            columns += [arcs, arcs, compact.first[u] + np.arange(height)]
            columns.append(compact.first[v] + np.arange(width))
            entries += [np.ones(2 * len(ours)), -np.ones(height + width)]
            row, column = row + height + width, column + len(ours)
        of_row, of_column = np.concatenate(rows), np.concatenate(columns)
        order = np.lexsort((of_row, of_column))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(cost), row
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(cost)), np.ones(len(cost))
        lp.row_lower_ = lp.row_upper_ = (np.arange(row) < compact.num_nodes).astype(np.float64)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        starts = np.searchsorted(of_column[order], np.arange(len(cost) + 1))
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = of_row[order].astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(entries)[order]
        model = silent_model()
        for option, value in (("mip_rel_gap", self.gap), ("mip_abs_gap", 0.0), ("threads", 1)):
            model.setOptionValue(option, value)
        model.passModel(lp)
        return model


def silent_model() -> Any:
    """Return an empty model that prints nothing.

    The constructor prints a banner to file descriptor 1, which may carry other output.
    """
    try:
        stdout = os.dup(1)
    except OSError:  # there is no such file descriptor
        stdout = -1
    try:
        if stdout >= 0:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
        model: Any = highspy.Highs()  # type: ignore[no-untyped-call]  # as highspy has it
        model.setOptionValue("output_flag", False)
    finally:
        if stdout >= 0:
            os.dup2(stdout, 1)
            os.close(stdout)
    return model
