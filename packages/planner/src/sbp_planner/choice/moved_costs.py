"""A lower bound on the cost of a min-sum problem, by moving costs between its terms.

    cost(x) = sum_f term_f(x_f)  >=  sum_f min term_f

That is poor as it stands. Costs may be moved between terms that share a variable, which changes no
cost(x): from each term of variable v its minima over all other variables are taken, m_f(v), and
their sum is given to terms of v again. It never lowers the bound, and repeated over all variables,
forwards and backwards, it climbs towards the dual of the linear relaxation (block-coordinate
ascent). Forwards it is given to terms that reach further on, so that costs travel through the
graph in one sweep.

It may stop short of the relaxation's optimum, and the relaxation may be below the cheapest
assignment: a gap is an upper limit of what could be gained, not what can be. A value x of v is in
no assignment that costs less than

    sum_f min term_f  +  sum over the terms f of v of (min term_f with v = x  -  min term_f)

A term is a table, or anything else whose minima are known, such as `joint.group_bound.Paid`.

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28
(2006); Werner, "A linear programming approach to max-sum problem: a review", PAMI 29 (2007),
section 6 (diffusion).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

import numpy as np

from sbp_core.infer import Factor
from sbp_planner.choice.problem import Floats, Ints


class CostTerm(Protocol):
    """A part of the cost, over some variables."""

    @property
    def variables(self) -> tuple[int, ...]:
        """The variables, in the order of their places."""
        ...

    @property
    def least(self) -> float:
        """The least that it costs."""
        ...

    def minima(self, place: int) -> Floats:
        """Return the least for each value of one variable."""
        ...

    def add(self, place: int, shift: Floats) -> None:
        """Add a cost to each value of one variable."""
        ...

    def restrict(self, kept: Mapping[int, Ints]) -> None:
        """Strike out all other values of some variables, by their places."""
        ...


class TableTerm:
    """A table as a term; it is copied."""

    def __init__(self, factor: Factor) -> None:
        self.variables = factor.variables
        self.table = np.array(factor.table, dtype=np.float64)

    @property
    def least(self) -> float:
        """The least entry."""
        return float(self.table.min())

    def minima(self, place: int) -> Floats:
        """Return the least for each value of one variable."""
        return minima_along(self.table, place)

    def add(self, place: int, shift: Floats) -> None:
        """Add a cost to each value of one variable."""
        self.table += shift.reshape([-1 if at == place else 1 for at in range(len(self.variables))])

    def restrict(self, kept: Mapping[int, Ints]) -> None:
        """Strike out all other values of some variables, by their places."""
        for place, values in kept.items():
            self.table = self.table.take(values, axis=place)


class _Part(NamedTuple):
    """A term of a variable, its place there, and its shares of what moves, ahead and back."""

    term: CostTerm
    place: int
    share: tuple[float, float]


class MovedCosts:
    """Moves costs between terms, to raise what all minima together come to.

    Args:
        sizes: Number of values of each variable.
        terms: The parts of the cost; they are changed.
        order: Of the variables, in which costs travel; that of the terms if None.

    Attributes:
        kept: Of each variable the values that are not struck out.
    """

    def __init__(
        self, sizes: Sequence[int], terms: Sequence[CostTerm], order: Sequence[int] | None = None
    ) -> None:
        self.terms = terms
        self.kept: list[Ints] = [np.arange(size) for size in sizes]
        places: list[list[tuple[CostTerm, int]]] = [[] for _ in sizes]
        for term in terms:
            for place, variable in enumerate(term.variables):
                places[variable].append((term, place))
        order = order or graph_order(len(sizes), [term.variables for term in terms])
        self._order = [v for v in order if places[v]]
        position = {variable: at for at, variable in enumerate(self._order)}
        self._parts: dict[int, list[_Part]] = {}
        for v in self._order:
            # What moves is shared by the terms that reach further on; by all, if none does.
            shares = []
            for way in (1, -1):
                further = [
                    any((position[u] - position[v]) * way > 0 for u in term.variables)
                    for term, _ in places[v]
                ]
                count = sum(further) or len(further)
                shares.append([(one or count == len(further)) / count for one in further])
            self._parts[v] = [
                _Part(term, place, share)
                for (term, place), share in zip(places[v], zip(*shares, strict=True), strict=True)
            ]

    @property
    def bound(self) -> float:
        """What no assignment costs less than."""
        return float(sum(term.least for term in self.terms))

    def sweep(self, deadline: float = inf) -> None:
        """Move the costs of each variable once forwards and once backwards.

        Args:
            deadline: Of `time.monotonic`, at which it ends before it is through.
        """
        for backwards in (0, 1):
            for variable in reversed(self._order) if backwards else self._order:
                if len(self.kept[variable]) > 1 and len(self._parts[variable]) > 1:
                    self._move(self._parts[variable], backwards)
            if monotonic() > deadline:
                return

    def _move(self, parts: Sequence[_Part], backwards: int) -> None:
        """Collect the minima of a variable from its terms, and give them to those further on."""
        minima = [part.term.minima(part.place) for part in parts]
        total = minima[0].copy()
        for least in minima[1:]:
            total += least
        possible = np.isfinite(total)
        everywhere = bool(possible.all())
        for part, least in zip(parts, minima, strict=True):
            share = part.share[backwards]
            if everywhere:
                if not share and not least.any():
                    continue
                shift = share * total - least
            else:
                # What some term forbids, all forbid.
                given = np.where(possible, total, 0.0) * share
                shift = np.where(possible, given - np.where(possible, least, 0.0), inf)
            part.term.add(part.place, shift)

    def strike(self, above: float) -> bool:
        """Strike out values that are in no assignment which costs at most that.

        Args:
            above: What costs more is of no interest.

        Returns:
            Whether there may be such an assignment; if not, nothing is struck out.
        """
        bound = self.bound
        if bound > above:
            return False
        left: list[Ints] = [np.arange(len(kept)) for kept in self.kept]
        for variable in self._order:
            more = np.zeros(len(self.kept[variable]))
            for part in self._parts[variable]:
                least = part.term.minima(part.place)
                more += least - least.min()
            left[variable] = np.flatnonzero(bound + more <= above)
            if not len(left[variable]):
                return False
        for term in self.terms:
            fewer = {
                place: left[v]
                for place, v in enumerate(term.variables)
                if len(left[v]) < len(self.kept[v])
            }
            if fewer:
                term.restrict(fewer)
        self.kept = [kept[stay] for kept, stay in zip(self.kept, left, strict=True)]
        return True


def graph_order(num_variables: int, scopes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the variables in the order in which terms over several come, which is the graph's.

    Args:
        num_variables: How many there are.
        scopes: The variables of each term.
    """
    first = [0] * num_variables
    for number, scope in reversed(list(enumerate(scopes))):
        if len(scope) > 1:
            for variable in scope:
                first[variable] = number
    return sorted(range(num_variables), key=lambda v: (first[v], v))


def minima_along(table: Floats, place: int) -> Floats:
    """Return the least of a table for each value along one of its dims."""
    axes = tuple(at for at in range(table.ndim) if at != place)
    least: Floats = np.minimum.reduce(table, axis=axes) if axes else table
    return least
