"""Compute a lower bound on the least sum of cost tables over shared variables, by moving costs.

`prove` and `joint.group_bound` bound the time of a training step: a variable is the split of an
operator or a state.

    cost(x) = sum_f term_f(x_f)  >=  sum_f min term_f

This bound alone is poor. Costs may be moved between terms that share a variable, which changes no
cost(x): take, from each term of variable v, its minima over all other variables, m_f(v), and give
their sum to terms of v again. This never lowers the bound. Repeated over all variables, forwards
and backwards, the bound rises towards the dual of the linear relaxation (block-coordinate ascent).
Forwards the sum is given to terms that reach further on, so costs travel through the graph in one
sweep.

The bound may stay below the relaxation's optimum, and that may be below the cheapest assignment. So
a gap is an upper limit of the possible gain. A value x of v is in no assignment that costs less
than

    sum_f min term_f  +  sum over the terms f of v of (min term_f with v = x  -  min term_f)

A term is a table, or any other function with known minima, such as `joint.group_bound.BoundTerm`.

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
    """A part of the cost that depends on some variables."""

    @property
    def variables(self) -> tuple[int, ...]:
        """The variables, in the order of their indices."""
        ...

    @property
    def least(self) -> float:
        """The minimum of the term."""
        ...

    def minima(self, place: int) -> Floats:
        """Return the minimum for each value of one variable."""
        ...

    def add(self, place: int, shift: Floats) -> None:
        """Add a cost to each value of one variable."""
        ...

    def restrict(self, kept: Mapping[int, Ints]) -> None:
        """Strike out all but the given values of some variables, by their indices."""
        ...


class TableTerm:
    """A table as a term; the table is copied."""

    def __init__(self, factor: Factor) -> None:
        self.variables = factor.variables
        self.table = np.array(factor.table, dtype=np.float64)

    @property
    def least(self) -> float:
        """The least entry."""
        return float(self.table.min())

    def minima(self, place: int) -> Floats:
        """Return the minimum for each value of one variable."""
        return minima_along(self.table, place)

    def add(self, place: int, shift: Floats) -> None:
        """Add a cost to each value of one variable."""
        self.table += shift.reshape([-1 if at == place else 1 for at in range(len(self.variables))])

    def restrict(self, kept: Mapping[int, Ints]) -> None:
        """Strike out all but the given values of some variables, by their indices."""
        for place, values in kept.items():
            self.table = self.table.take(values, axis=place)


class _Part(NamedTuple):
    """A term of a variable, the variable's index in it, and its shares ahead and back."""

    term: CostTerm
    place: int
    share: tuple[float, float]


class MovedCosts:
    """Moves costs between terms, to raise the sum of their minima.

    Args:
        sizes: Number of values of each variable.
        terms: The parts of the cost; they are changed.
        order: Order of the variables in which costs travel; None for the order of the terms.

    Attributes:
        kept: For each variable, the values that are not struck out.
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
            # Terms that reach further on share the moved cost; all terms, if none does.
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
        """The lower bound: no assignment costs less."""
        return float(sum(term.least for term in self.terms))

    def sweep(self, deadline: float = inf) -> None:
        """Move the costs of each variable once forwards and once backwards.

        Args:
            deadline: Time of `time.monotonic` at which it ends early, in s.
        """
        for backwards in (0, 1):
            for variable in reversed(self._order) if backwards else self._order:
                if len(self.kept[variable]) > 1 and len(self._parts[variable]) > 1:
                    self._move(self._parts[variable], backwards)
            if monotonic() > deadline:
                return

    def _move(self, parts: Sequence[_Part], backwards: int) -> None:
        """Collect the minima of a variable from its terms, and give them to terms further on."""
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
                # A value that some term forbids is forbidden by all.
                given = np.where(possible, total, 0.0) * share
                shift = np.where(possible, given - np.where(possible, least, 0.0), inf)
            part.term.add(part.place, shift)

    def strike(self, above: float) -> bool:
        """Strike out values that are in no assignment which costs at most `above`.

        Args:
            above: Assignments that cost more do not matter.

        Returns:
            Whether there may be an assignment of at most that cost; if not, nothing is struck out.
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
    """Return the variables in the order of the first term over several variables that has them.

    Args:
        num_variables: Number of variables.
        scopes: The variables of each term.
    """
    first = [0] * num_variables
    for number, scope in reversed(list(enumerate(scopes))):
        if len(scope) > 1:
            for variable in scope:
                first[variable] = number
    return sorted(range(num_variables), key=lambda v: (first[v], v))


def minima_along(table: Floats, place: int) -> Floats:
    """Return the minimum of a table for each value along one of its dims."""
    axes = tuple(at for at in range(table.ndim) if at != place)
    least: Floats = np.minimum.reduce(table, axis=axes) if axes else table
    return least
