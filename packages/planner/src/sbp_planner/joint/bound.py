"""A lower bound on the cost of a step, however it is assigned.

    cost(x) = sum_f table_f(x_f)  >=  sum_f min table_f

That is poor as it stands. Costs may be moved between tables that share a variable, which changes no
cost(x): from each table of variable v its minima over all other variables are taken, m_f(v), and
their sum is given to tables of v again. It never lowers the bound, and repeated over all variables,
forwards and backwards, it climbs towards the dual of the linear relaxation (block-coordinate
ascent). Forwards it is given to tables that reach further on, so that costs travel through the
graph in one sweep. At the end, variables are eliminated in mini-buckets, which is exact where the
tables of a bucket fit one table, and never below the sum of minima.

It may stop short of the relaxation's optimum, and the relaxation may be below the cheapest
assignment: a gap is an upper limit of what could be gained, not what can be.

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28
(2006); Werner, "A linear programming approach to max-sum problem: a review", PAMI 29 (2007),
section 6 (diffusion); Dechter and Rish, "Mini-buckets", Journal of the ACM 50 (2003).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import reduce
from math import inf, prod
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, Factor

Table = NDArray[np.float64]

#: A sweep that gains less than this share of the bound is the last.
_LEAST_GAIN = 2e-4


class DualBound:
    """Moves costs between tables, to raise what all minima together come to.

    Args:
        sizes: Number of values of each variable.
        factors: The cost tables; copied.
    """

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor]) -> None:
        self.sizes = sizes
        self.variables = [factor.variables for factor in factors]
        self.tables = [np.where(f.table >= FORBIDDEN_S, inf, f.table) for f in factors]
        self.tables_of: list[list[tuple[int, int]]] = [[] for _ in sizes]
        for number, variables in enumerate(self.variables):
            for place, variable in enumerate(variables):
                self.tables_of[variable].append((number, place))
        # In the order in which the tables come, which is that of the graph.
        first = [min((n for n, _ in own if len(self.variables[n]) > 1), default=0)
                 for own in self.tables_of]  # fmt: skip
        self.order = sorted(range(len(sizes)), key=lambda v: (first[v], v))
        self.position = {variable: at for at, variable in enumerate(self.order)}

    @property
    def bound(self) -> float:
        """What no assignment costs less than, by the minima of all tables."""
        return float(sum(table.min() for table in self.tables))

    def climb(self, *, deadline: float, target: float) -> float:
        """Sweep until the bound reaches a target, gains little more, or time is up; return it.

        Args:
            deadline: Of `time.monotonic`.
            target: Bound that is enough.
        """
        bound = self.bound
        while monotonic() < deadline and bound < target:
            for forwards in (True, False):
                order = self.order if forwards else reversed(self.order)
                for variable in order:
                    self._move(variable, forwards=forwards)
                    if monotonic() > deadline:
                        return max(bound, self.bound)
            before, bound = bound, self.bound
            if bound - before < _LEAST_GAIN * abs(bound):
                break
        return bound

    def _move(self, variable: int, *, forwards: bool) -> None:
        """Collect the minima of a variable from its tables, and give them to those further on."""
        own = self.tables_of[variable]
        if len(own) < 2:
            return
        minima = [_minima(self.tables[number], place) for number, place in own]
        total = reduce(np.add, minima)
        possible = np.isfinite(total)
        further = [self._reaches(number, variable, forwards=forwards) for number, _ in own]
        share = [1.0 if one else 0.0 for one in further] if any(further) else [1.0] * len(own)
        each = np.where(possible, total, 0.0) / sum(share)
        for (number, place), least, part in zip(own, minima, share, strict=True):
            table = self.tables[number]
            # What some table forbids, all forbid.
            shift = np.where(possible, part * each - np.where(possible, least, 0.0), inf)
            shape = [1] * table.ndim
            shape[place] = -1
            table += shift.reshape(shape)

    def _reaches(self, number: int, variable: int, *, forwards: bool) -> bool:
        here = self.position[variable]
        others = (self.position[v] for v in self.variables[number] if v != variable)
        return any(at > here if forwards else at < here for at in others)

    def eliminated(self, max_entries: int) -> float:
        """Return the bound of an elimination in mini-buckets of tables up to a size."""
        return _MiniBuckets(self.sizes, self.variables, self.tables, max_entries).run()


def _minima(table: Table, place: int) -> Table:
    """Return the least of a table for each value along one of its dims."""
    axes = tuple(at for at in range(table.ndim) if at != place)
    least: Table = table.min(axis=axes) if axes else table
    return least


class _MiniBuckets:
    """One elimination of all variables, each from as few mini-buckets as tables allow."""

    def __init__(
        self,
        sizes: Sequence[int],
        variables: Sequence[tuple[int, ...]],
        tables: Sequence[Table],
        max_entries: int,
    ) -> None:
        self.sizes, self.max_entries = sizes, max_entries
        self.constant = 0.0
        self.buckets: list[dict[int, tuple[tuple[int, ...], Table]]] = [{} for _ in sizes]
        self.num_tables = 0
        for scope, table in zip(variables, tables, strict=True):
            self._add(scope, table)

    def run(self) -> float:
        # The variable whose table would be smallest goes first.
        present = [self._entries(v) for v in range(len(self.sizes))]
        queue = [(entries, v) for v, entries in enumerate(present)]
        heapq.heapify(queue)
        done: set[int] = set()
        while queue:
            entries, variable = heapq.heappop(queue)
            if variable in done or entries != present[variable]:
                continue
            done.add(variable)
            for other in self._eliminate(variable) - done:
                now = self._entries(other)
                if now != present[other]:
                    present[other] = now
                    heapq.heappush(queue, (now, other))
        return self.constant

    def _add(self, scope: tuple[int, ...], table: Table) -> None:
        if not scope:
            self.constant += float(table)
            return
        for variable in scope:
            self.buckets[variable][self.num_tables] = (scope, table)
        self.num_tables += 1

    def _entries(self, variable: int) -> int:
        scope = {v for of, _ in self.buckets[variable].values() for v in of}
        return prod([self.sizes[v] for v in scope])

    def _eliminate(self, variable: int) -> set[int]:
        taken = list(self.buckets[variable].items())
        for key, (scope, _) in taken:
            for v in scope:
                del self.buckets[v][key]
        scopes, sums = self._sums([entry for _, entry in taken], variable)
        if len(sums) > 1:
            # They are made to agree as far as they can.
            least = [_minima(table, table.ndim - 1) for table in sums]
            mean = reduce(np.add, least) / len(least)
            possible = np.isfinite(mean)
            sums = [
                table + np.where(possible, mean - np.where(possible, own, 0.0), inf)
                for table, own in zip(sums, least, strict=True)
            ]
        for scope, table in zip(scopes, sums, strict=True):
            self._add(scope, table.min(axis=-1))
        return {v for scope in scopes for v in scope}

    def _sums(
        self, entries: list[tuple[tuple[int, ...], Table]], variable: int
    ) -> tuple[list[tuple[int, ...]], list[Table]]:
        """Return for each mini-bucket of a variable its other variables, and its table."""
        parts: list[tuple[set[int], list[tuple[tuple[int, ...], Table]]]] = []
        for scope, table in sorted(entries, key=lambda entry: -entry[1].size):
            for joint, part in parts:
                more = joint | set(scope)
                if prod([self.sizes[v] for v in more]) <= self.max_entries:
                    joint |= more
                    part.append((scope, table))
                    break
            else:
                parts.append((set(scope), [(scope, table)]))
        scopes = [tuple(sorted(joint - {variable})) for joint, _ in parts]
        sums = [
            reduce(np.add, (_aligned(own, table, (*scope, variable)) for own, table in part))
            for scope, (_, part) in zip(scopes, parts, strict=True)
        ]
        return scopes, sums


def _aligned(scope: tuple[int, ...], table: Table, order: tuple[int, ...]) -> Table:
    """Return a table with its dims in an order of variables, of extent 1 where it has none."""
    place = [order.index(v) for v in scope]
    moved = table.transpose(sorted(range(len(place)), key=place.__getitem__))
    shape = [1] * len(order)
    for variable, at in zip(scope, place, strict=True):
        shape[at] = table.shape[scope.index(variable)]
    return moved.reshape(shape)
