"""A lower bound on the cost of a step, however it is assigned.

    cost(x) = sum_f table_f(x_f)  >=  sum_f min table_f

That is poor as it stands. Costs may be moved between tables that share a variable, which changes no
cost(x): from each table of variable v its minima over all other variables are taken, m_f(v), and
their sum is given to tables of v again. It never lowers the bound, and repeated over all variables,
forwards and backwards, it climbs towards the dual of the linear relaxation (block-coordinate
ascent). Forwards it is given to tables that reach further on, so that costs travel through the
graph in one sweep.

It may stop short of the relaxation's optimum, and the relaxation may be below the cheapest
assignment: a gap is an upper limit of what could be gained, not what can be. A value x of v is in
no assignment that costs less than

    sum_f min table_f  +  sum over the tables f of v of (min table_f with v = x  -  min table_f)

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28
(2006); Werner, "A linear programming approach to max-sum problem: a review", PAMI 29 (2007),
section 6 (diffusion).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import NamedTuple

import numpy as np

from sbp_planner.joint.buckets import MiniBuckets, Numbers, Scoped, minima_along


class _Part(NamedTuple):
    """One table of a variable.

    Args:
        number: Of the table.
        place: Of the variable in it.
        shape: That gives costs of the variable to it.
        share: Of what is given again that it gets, forwards and backwards.
    """

    number: int
    place: int
    shape: tuple[int, ...]
    share: tuple[float, float]


class DualBound:
    """Moves costs between tables, to raise what all minima together come to.

    Args:
        sizes: Number of values of each variable.
        tables: The cost tables; copied. `inf` forbids.
        order: Of the variables, in which costs travel; that of the graph if omitted.
    """

    def __init__(
        self, sizes: Sequence[int], tables: Sequence[Scoped], order: Sequence[int] | None = None
    ) -> None:
        self.sizes = list(sizes)
        self.scopes = [scope for scope, _ in tables]
        self.tables = [np.array(table, dtype=np.float64) for _, table in tables]
        parts: list[list[tuple[int, int]]] = [[] for _ in sizes]
        for number, scope in enumerate(self.scopes):
            for place, variable in enumerate(scope):
                parts[variable].append((number, place))
        self._order = [v for v in order or graph_order(sizes, self.scopes) if parts[v]]
        position = {variable: at for at, variable in enumerate(self._order)}
        self._parts = {v: self._parts_of(v, parts[v], position) for v in self._order}

    def _parts_of(
        self, variable: int, parts: Sequence[tuple[int, int]], position: dict[int, int]
    ) -> list[_Part]:
        here = position[variable]
        further = [
            [
                any((position[v] - here) * way > 0 for v in self.scopes[number])
                for number, _ in parts
            ]
            for way in (1, -1)
        ]
        shares = [
            [one / sum(of) for one in of] if any(of) else [1 / len(of)] * len(of) for of in further
        ]
        return [
            _Part(
                number=number,
                place=place,
                shape=tuple(-1 if at == place else 1 for at in range(len(self.scopes[number]))),
                share=share,
            )
            for (number, place), share in zip(parts, zip(*shares, strict=True), strict=True)
        ]

    @property
    def bound(self) -> float:
        """What no assignment costs less than, by the minima of all tables."""
        return float(sum(table.min() for table in self.tables))

    @property
    def scoped(self) -> list[Scoped]:
        """The tables as they are now, with their variables."""
        return list(zip(self.scopes, self.tables, strict=True))

    def sweep(self, deadline: float = inf) -> None:
        """Move the costs of each variable once forwards and once backwards.

        Args:
            deadline: Of `time.monotonic`, at which it ends before it is through.
        """
        for backwards in (0, 1):
            for variable in reversed(self._order) if backwards else self._order:
                if self.sizes[variable] > 1 and len(self._parts[variable]) > 1:
                    self._move(self._parts[variable], backwards)
            if monotonic() > deadline:
                return

    def _move(self, parts: Sequence[_Part], backwards: int) -> None:
        """Collect the minima of a variable from its tables, and give them to those further on."""
        minima = [minima_along(self.tables[part.number], part.place) for part in parts]
        total = minima[0].copy()
        for least in minima[1:]:
            total += least
        possible = np.isfinite(total)
        everywhere = bool(possible.all())
        if not everywhere:
            total[~possible] = 0.0
        for part, least in zip(parts, minima, strict=True):
            share = part.share[backwards]
            if not everywhere:
                # What some table forbids, all forbid.
                shift = np.where(possible, share * total - np.where(possible, least, 0.0), inf)
            elif share:
                shift = share * total - least
            elif least.any():
                shift = -least
            else:
                continue
            table = self.tables[part.number]
            table += shift.reshape(part.shape)

    def kept(self, above: float) -> list[Numbers] | None:
        """Return the places of the values of each variable in assignments that cost at most that.

        Args:
            above: What costs more is of no interest.

        Returns:
            Of each variable at least those that are in such an assignment; None if there is none.
        """
        bound = self.bound
        if bound > above:
            return None
        found: list[Numbers] = [np.arange(size) for size in self.sizes]
        for variable in self._order:
            more = np.zeros(self.sizes[variable])
            for part in self._parts[variable]:
                least = minima_along(self.tables[part.number], part.place)
                more += least - least.min()
            found[variable] = np.flatnonzero(bound + more <= above)
            if not len(found[variable]):
                return None
        return found

    def restrict(self, kept: Sequence[Numbers]) -> None:
        """Strike out all other values.

        Args:
            kept: For each variable the places of those that stay.
        """
        for number, scope in enumerate(self.scopes):
            table = self.tables[number]
            for place, variable in enumerate(scope):
                if len(kept[variable]) < table.shape[place]:
                    table = table.take(kept[variable], axis=place)
            self.tables[number] = table
        self.sizes = list(map(len, kept))

    def eliminated(self, max_entries: int) -> float:
        """Return the bound of an elimination in mini-buckets of tables up to a size."""
        return MiniBuckets(self.sizes, self.scoped, max_entries).run()


def graph_order(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the variables in the order in which tables with others come, which is the graph's.

    Args:
        sizes: Number of values of each variable.
        scopes: The variables of each table.
    """
    first = [0] * len(sizes)
    for number, scope in reversed(list(enumerate(scopes))):
        if len(scope) > 1:
            for variable in scope:
                first[variable] = number
    return sorted(range(len(sizes)), key=lambda v: (first[v], v))
