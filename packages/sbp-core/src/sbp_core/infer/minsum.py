"""Min-sum problems: discrete variables, cost tables over few of them, least total cost.

Minimise   F(x) = sum_f table_f[x restricted to the variables of f]

Solved by *bucket elimination*: take a variable away, put in place of the tables that mention it
one table of their minimum over it, and go on until none is left; then read the variables off
backwards. This is exact. Its tables grow with the width of the graph, so when the next one would be
larger than a limit, a variable is *held* at its present value and the elimination goes on with the
rest: exact given the held ones, so that the total never rises. Rounds hold different variables
until no round gains. Knows nothing of SBP.

Source: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence
113 (1999), section 4; Jia et al., "Exploring hidden dimensions in parallelizing convolutional
neural networks", ICML 2018, section 5 (node elimination).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import SbpValueError

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A cost table: one axis for each of `variables`, in that order; `inf` forbids."""

    variables: tuple[int, ...]
    table: Table

    def __post_init__(self) -> None:
        if len(set(self.variables)) != len(self.variables) or self.table.ndim != len(
            self.variables
        ):
            raise SbpValueError(
                f"a table of shape {self.table.shape} over the variables {self.variables}",
                accepted="one axis for each of distinct variables",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Values of all variables, their total cost, and whether that is proved to be the least."""

    values: tuple[int, ...]
    cost: float
    exact: bool


def total(factors: Sequence[Factor], values: Sequence[int]) -> float:
    """Return F(values)."""
    return float(sum(f.table[tuple(values[v] for v in f.variables)] for f in factors))


def minimise(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    start: Sequence[int],
    *,
    max_entries: int = 1 << 18,
    max_rounds: int = 6,
) -> Solution:
    """Minimise the sum of the factors, never ending above the cost of `start`.

    Args:
        sizes: Number of values of each variable, >= 1.
        factors: The cost tables.
        start: A value of each variable, best one that the tables allow.
        max_entries: Largest table that may be made; beyond it variables are held.
        max_rounds: Rounds of at most this number, while some variables must be held.

    Returns:
        The best values found. A cost of `inf` means that nothing is allowed (if exact), or that
        nothing allowed was found.
    """
    best = Solution(values=tuple(start), cost=total(factors, start), exact=False)
    times_held = [0] * len(sizes)
    idle = 0
    for _ in range(max_rounds):
        elimination = _Elimination(sizes, factors, best.values, times_held, max_entries)
        values = elimination.run()
        cost = total(factors, values)
        for variable in elimination.held:
            times_held[variable] += 1
        if not elimination.held:
            return Solution(values=values, cost=cost, exact=True)
        idle = 0 if cost < best.cost else idle + 1
        if cost < best.cost:
            best = Solution(values=values, cost=cost, exact=False)
        if idle == 2:
            break
    return best


class _Elimination:
    """One elimination of all variables, holding some at `present` if tables grow too large."""

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        present: Sequence[int],
        times_held: Sequence[int],
        max_entries: int,
    ) -> None:
        self.sizes = sizes
        self.present = present
        self.times_held = times_held
        self.max_entries = max_entries
        self.held: dict[int, int] = {}
        self.buckets: list[dict[int, Factor]] = [{} for _ in sizes]
        self.made: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
        self.num_factors = 0
        for factor in factors:
            self._add(_without_constants(factor, sizes))

    def _add(self, factor: Factor) -> None:
        if not factor.variables:
            return
        for variable in factor.variables:
            self.buckets[variable][self.num_factors] = factor
        self.num_factors += 1

    def _neighbours(self, variable: int) -> set[int]:
        return {v for factor in self.buckets[variable].values() for v in factor.variables}

    def _entries(self, variable: int) -> int:
        return prod(self.sizes[v] for v in self._neighbours(variable))

    def run(self) -> tuple[int, ...]:
        queue = [(self._entries(v), v) for v in range(len(self.sizes))]
        heapq.heapify(queue)
        done: set[int] = set()
        while queue:
            entries, variable = heapq.heappop(queue)
            if variable in done:
                continue
            now = self._entries(variable)
            if now != entries:
                heapq.heappush(queue, (now, variable))
                continue
            if now > self.max_entries:
                touched = self._hold(variable)
                done.update(self.held)
            else:
                touched = self._eliminate(variable)
                done.add(variable)
            for other in touched - done:
                heapq.heappush(queue, (self._entries(other), other))
        return self._read_back()

    def _take(self, variable: int) -> list[Factor]:
        """Remove and return the factors of a variable."""
        taken = list(self.buckets[variable].items())
        for key, factor in taken:
            for v in factor.variables:
                del self.buckets[v][key]
        return [factor for _, factor in taken]

    def _eliminate(self, variable: int) -> set[int]:
        factors = self._take(variable)
        rest = tuple(sorted({v for f in factors for v in f.variables} - {variable}))
        order = (*rest, variable)
        if not factors:
            self.made.append((variable, (), np.zeros((), dtype=np.intp)))
            return set()
        table = reduce(np.add, (_align(factor, order) for factor in factors))
        table = np.broadcast_to(table, tuple(self.sizes[v] for v in order))
        self.made.append((variable, rest, table.argmin(axis=-1)))
        if rest:
            self._add(Factor(rest, np.asarray(table.min(axis=-1))))
        return set(rest)

    def _hold(self, around: int) -> set[int]:
        """Hold the most connected neighbour of `around` that was held least often so far."""
        chosen = min(
            self._neighbours(around),
            key=lambda v: (self.times_held[v], -len(self.buckets[v]), v),
        )
        value = self.present[chosen]
        self.held[chosen] = value
        touched: set[int] = set()
        for factor in self._take(chosen):
            at = factor.variables.index(chosen)
            rest = factor.variables[:at] + factor.variables[at + 1 :]
            touched.update(rest)
            if rest:
                self._add(Factor(rest, np.asarray(factor.table.take(value, axis=at))))
        return touched

    def _read_back(self) -> tuple[int, ...]:
        values = list(self.present)
        for variable, value in self.held.items():
            values[variable] = value
        for variable, rest, choice in reversed(self.made):
            values[variable] = int(choice[tuple(values[v] for v in rest)])
        return tuple(values)


def _without_constants(factor: Factor, sizes: Sequence[int]) -> Factor:
    """Return the factor over the variables that have a choice; the others would only cost axes."""
    kept = tuple(variable for variable in factor.variables if sizes[variable] > 1)
    return Factor(kept, factor.table.reshape([sizes[variable] for variable in kept]))


def _align(factor: Factor, order: tuple[int, ...]) -> Table:
    """Return the table with its axes in `order`, of extent 1 where it has none."""
    place = [order.index(v) for v in factor.variables]
    by_place = sorted(range(len(place)), key=place.__getitem__)
    table = factor.table.transpose(by_place)
    index: list[Any] = [None] * len(order)
    for at in place:
        index[at] = slice(None)
    placed: Table = table[tuple(index)]
    return placed
