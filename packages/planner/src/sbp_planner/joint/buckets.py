"""Elimination of variables from cost tables: exact while tables are small, in mini-buckets beyond.

`Buckets` takes variables away as long as the table over all that they stand with is small enough,
and knows of each how it follows from those that are left. `MiniBuckets` takes all of them: where a
table would be too large, several are made in its place, each minimised by itself, so that what
comes out is a bound. Both: Dechter, "Bucket elimination: a unifying framework for reasoning",
Artificial Intelligence 113 (1999); Dechter and Rish, "Mini-buckets", Journal of the ACM 50 (2003).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Numbers = NDArray[np.int64]

#: A table and the variables of its dims.
Scoped = tuple[tuple[int, ...], Table]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Taken:
    """How the value of a variable that was taken away follows from those it stood with.

    Args:
        variable: Which.
        rest: The variables that it stood with.
        allowed: Of each of these, the values that it had then, ascending.
        choice: The value for each of their values.
    """

    variable: int
    rest: tuple[int, ...]
    allowed: tuple[Numbers, ...]
    choice: Numbers


class Buckets:
    """Cost tables, from which variables are taken away, and values struck out.

    Args:
        sizes: Number of values of each variable.
        tables: The costs; `inf` forbids.
    """

    def __init__(self, sizes: Sequence[int], tables: Iterable[Scoped]) -> None:
        #: The values of each variable that are not struck out; tables are over these.
        self.allowed: list[Numbers] = [np.arange(size) for size in sizes]
        #: What the variables cost that were taken away.
        self.constant = 0.0
        self._tables: dict[int, Scoped] = {}
        self._of: list[set[int]] = [set() for _ in sizes]
        self._left = set(range(len(sizes)))
        self._taken: list[_Taken] = []
        self._num_tables = 0
        for scope, table in tables:
            self._add(scope, table)

    @property
    def sizes(self) -> list[int]:
        """Number of values of each variable that are not struck out."""
        return list(map(len, self.allowed))

    @property
    def variables(self) -> set[int]:
        """Those that are left."""
        return self._left

    @property
    def tables(self) -> list[Scoped]:
        """The tables that are left."""
        return list(self._tables.values())

    def restrict(self, kept: Sequence[Numbers]) -> None:
        """Strike out values of variables; `replace` is then told the smaller tables.

        Args:
            kept: For each variable the places of the values that are kept.
        """
        for variable in self._left:
            if len(kept[variable]) < len(self.allowed[variable]):
                self.allowed[variable] = self.allowed[variable][kept[variable]]

    def replace(self, tables: Iterable[Scoped]) -> None:
        """Take other tables, of the same cost for every assignment that is left."""
        self._tables = {}
        for of in self._of:
            of.clear()
        for scope, table in tables:
            self._add(scope, table)

    def merged(self) -> list[Scoped]:
        """Return the tables, each added to one over all its variables and more if there is one."""
        found = dict(self._tables)
        for key in sorted(found, key=lambda at: len(found[at][0])):
            scope, table = found[key]
            others = set.intersection(*(self._of[variable] for variable in scope)) - {key}
            larger = [at for at in others if at in found]
            if larger:
                into = min(larger, key=lambda at: (found[at][1].size, at))
                order, more = found[into]
                found[into] = order, more + aligned(scope, table, order)
                del found[key]
        return list(found.values())

    def eliminate(self, max_entries: int) -> None:
        """Take variables away while the table over all that one stands with is small enough.

        Args:
            max_entries: Of that table, with the variable itself.
        """
        for variable in [v for v in self._left if len(self.allowed[v]) == 1]:
            self._fix(variable)
        present = {variable: self._entries(variable) for variable in self._left}
        queue = [(entries, variable) for variable, entries in present.items()]
        heapq.heapify(queue)
        while queue:
            entries, variable = heapq.heappop(queue)
            if variable not in self._left or entries != present[variable]:
                continue
            if entries > max_entries:
                break
            for other in self._eliminate(variable):
                now = self._entries(other)
                if now != present[other]:
                    present[other] = now
                    heapq.heappush(queue, (now, other))

    def places(self, values: Sequence[int]) -> tuple[int, ...] | None:
        """Return the place of each variable's value among those allowed; None if one is not.

        Of variables that were taken away it is 0.
        """
        found = [0] * len(self.allowed)
        for variable in self._left:
            allowed = self.allowed[variable]
            at = int(np.searchsorted(allowed, values[variable]))
            if at == len(allowed) or allowed[at] != values[variable]:
                return None
            found[variable] = at
        return tuple(found)

    def expanded(self, places: Sequence[int]) -> tuple[int, ...]:
        """Return the values of all variables, those that were taken away at their best.

        Args:
            places: Of the values of the variables that are left; any for others.
        """
        values = [0] * len(self.allowed)
        for variable in self._left:
            values[variable] = int(self.allowed[variable][places[variable]])
        for taken in reversed(self._taken):
            at = tuple(
                int(np.searchsorted(allowed, values[v]))
                for v, allowed in zip(taken.rest, taken.allowed, strict=True)
            )
            values[taken.variable] = int(taken.choice[at])
        return tuple(values)

    def _add(self, scope: tuple[int, ...], table: Table) -> None:
        if not scope:
            self.constant += float(table)
            return
        for variable in scope:
            self._of[variable].add(self._num_tables)
        self._tables[self._num_tables] = scope, table
        self._num_tables += 1

    def _remove(self, variable: int) -> list[Scoped]:
        """Remove and return the tables of a variable, in the order in which they came."""
        found = []
        for key in sorted(self._of[variable]):
            scope, table = self._tables.pop(key)
            for v in scope:
                self._of[v].discard(key)
            found.append((scope, table))
        return found

    def _entries(self, variable: int) -> int:
        scope = {variable, *(v for key in self._of[variable] for v in self._tables[key][0])}
        return prod([len(self.allowed[v]) for v in scope])

    def _fix(self, variable: int) -> None:
        """Take a variable of one value away."""
        for scope, table in self._remove(variable):
            at = scope.index(variable)
            self._add(scope[:at] + scope[at + 1 :], np.asarray(table.take(0, axis=at)))
        self._note(variable, (), np.zeros((), dtype=np.int64))

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        """Take a variable away; return those that it stood with."""
        taken = self._remove(variable)
        rest = tuple(sorted({v for scope, _ in taken for v in scope} - {variable}))
        if not taken:
            self._note(variable, (), np.zeros((), dtype=np.int64))
            return ()
        order = (*rest, variable)
        table = reduce(np.add, (aligned(scope, table, order) for scope, table in taken))
        choice = table.argmin(axis=-1)
        self._note(variable, rest, choice)
        self._add(rest, np.asarray(table.min(axis=-1)))
        return rest

    def _note(self, variable: int, rest: tuple[int, ...], choice: Numbers) -> None:
        self._left.discard(variable)
        self._taken.append(
            _Taken(
                variable=variable,
                rest=rest,
                allowed=tuple(self.allowed[v] for v in rest),
                choice=self.allowed[variable][choice],
            )
        )


class MiniBuckets:
    """One elimination of all variables, each from as few mini-buckets as tables allow.

    Args:
        sizes: Number of values of each variable.
        tables: The costs, each with the variables of its dims.
        max_entries: Of the largest table.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        tables: Iterable[tuple[tuple[int, ...], Table]],
        max_entries: int,
    ) -> None:
        self.sizes, self.max_entries = sizes, max_entries
        self.constant = 0.0
        self.buckets: list[dict[int, tuple[tuple[int, ...], Table]]] = [{} for _ in sizes]
        self.num_tables = 0
        for scope, table in tables:
            self._add(scope, table)

    def run(self) -> float:
        """Return the bound."""
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
            least = [minima_along(table, table.ndim - 1) for table in sums]
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
            reduce(np.add, (aligned(own, table, (*scope, variable)) for own, table in part))
            for scope, (_, part) in zip(scopes, parts, strict=True)
        ]
        return scopes, sums


def minima_along(table: Table, place: int) -> Table:
    """Return the least of a table for each value along one of its dims."""
    axes = tuple(at for at in range(table.ndim) if at != place)
    least: Table = np.minimum.reduce(table, axis=axes) if axes else table
    return least


def aligned(scope: tuple[int, ...], table: Table, order: tuple[int, ...]) -> Table:
    """Return a table with its dims in an order of variables, of extent 1 where it has none."""
    place = [order.index(v) for v in scope]
    moved = table.transpose(sorted(range(len(place)), key=place.__getitem__))
    shape = [1] * len(order)
    for variable, at in zip(scope, place, strict=True):
        shape[at] = table.shape[scope.index(variable)]
    return moved.reshape(shape)
