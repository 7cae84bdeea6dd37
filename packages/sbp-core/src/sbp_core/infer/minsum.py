"""Min-sum problems: discrete variables, cost tables over few of them, least total cost.

Minimise   F(x) = sum_f table_f[x restricted to the variables of f]

Solved by *bucket elimination*: take a variable away, put in place of the tables that mention it
one table of their minimum over it, and go on until none is left; then read the variables off
backwards. This is exact. Its tables grow with the width of the graph, so when the next one would be
larger than a limit, a variable is *held* at its present value and the elimination goes on with the
rest: exact given the held ones, so that the total never rises. Rounds hold different variables
until no round gains. Repeated layers of a network bring equal tables, whose sums and minima are
computed once and shared. Knows nothing of SBP.

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
Choice = NDArray[np.int32]


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


def total_cost(factors: Sequence[Factor], values: Sequence[int]) -> float:
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
        max_rounds: Rounds, at most, while some variables must be held; two in a row without gain
            end them, too.

    Returns:
        The best values found. A cost of `inf` means that nothing is allowed (if exact), or that
        nothing allowed was found.
    """
    # A round holds variables at the values of the best solution so far, which it can therefore find
    # again: no round is worse. It prefers to hold those that were held least often, so that what
    # one round could not move, another can:
    #
    #     chain-like graph    nothing is held                       round 1 is exact
    #     dense graph         round 1 holds {a, b} as they are      the rest is optimal for that
    #                         round 2 holds {c, d} instead          a and b may move now
    best = Solution(values=tuple(start), cost=total_cost(factors, start), exact=False)
    times_held = [0] * len(sizes)
    idle = 0
    shared = _Shared()
    own = [shared.interned(_without_constants(factor, sizes)) for factor in factors]
    for _ in range(max_rounds):
        elimination = _Elimination(sizes, own, best.values, times_held, max_entries, shared)
        values = elimination.run()
        cost = total_cost(factors, values)
        for variable in elimination.held:
            times_held[variable] += 1
        if not elimination.held:
            return Solution(values=values, cost=cost, exact=True)
        idle = 0 if cost < best.cost else idle + 1
        if cost < best.cost:
            best = Solution(values=values, cost=cost, exact=False)
        # One round without gain may have held the wrong variables; after two it is given up.
        if idle == 2:
            break
    return best


class _Shared:
    """What is computed once for equal tables; they live as long as this, so ids tell them apart.

    before: layer 1 takes x1 from f(x1, y1), g(x1, z1)    layer 2 takes x2 from f(x2, y2), g(x2, z2)
    after:  h(y, z) = min over x of f(x, y) + g(x, z) is made for layer 1, and named h(y2, z2) too
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[tuple[int, ...], bytes], Table] = {}
        self._minima: dict[object, tuple[Choice, Table]] = {}
        self._slices: dict[tuple[int, int, int], Table] = {}

    def interned(self, factor: Factor) -> Factor:
        """Return the factor with the first table that was equal to its own, bit by bit."""
        table = self._tables.setdefault((factor.table.shape, factor.table.tobytes()), factor.table)
        return Factor(factor.variables, table)

    def minimum(self, factors: Sequence[Factor], order: tuple[int, ...]) -> tuple[Choice, Table]:
        """Return where the sum of some factors is least over the last of `order`, and that least.

        Args:
            factors: At least one.
            order: Their variables, all of them.
        """
        place = {variable: at for at, variable in enumerate(order)}
        # Names of variables do not matter, only which axis of which table is which place of
        # `order`. Equal tables are one object (`interned`; minima and slices of equal tables are,
        # too), so ids tell what is equal, and layer after layer finds the minimum of the first.
        key = tuple((id(f.table), tuple(place[v] for v in f.variables)) for f in factors)
        found = self._minima.get(key)
        if found is None:
            # The variable that is taken away is the last axis; broadcasting makes the sum.
            table = reduce(np.add, (_align(factor, order) for factor in factors))
            choice = table.argmin(axis=-1)
            least = np.take_along_axis(table, choice[..., None], axis=-1)[..., 0]
            # Any number of choices that tables may have fits.
            found = self._minima[key] = (choice.astype(np.int32), least)
        return found

    def slice(self, table: Table, axis: int, index: int) -> Table:
        """Return what is left of a table at one index of one axis."""
        key = (id(table), axis, index)
        if key not in self._slices:
            self._slices[key] = np.asarray(table.take(index, axis=axis))
        return self._slices[key]


class _Elimination:
    """One elimination of all variables, holding some at `present` if tables grow too large."""

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        present: Sequence[int],
        times_held: Sequence[int],
        max_entries: int,
        shared: _Shared,
    ) -> None:
        self.sizes = sizes
        self.shared = shared
        self.present = present
        self.times_held = times_held
        self.max_entries = max_entries
        self.held: dict[int, int] = {}
        # A bucket has the factors that mention a variable; a factor is in the bucket of each of its
        # variables, under one number, so that it can be taken out of all of them.
        self.buckets: list[dict[int, Factor]] = [{} for _ in sizes]
        self.made: list[tuple[int, tuple[int, ...], Choice]] = []
        self.num_factors = 0
        for factor in factors:
            self._add(factor)

    def _add(self, factor: Factor) -> None:
        if not factor.variables:
            return
        for variable in factor.variables:
            self.buckets[variable][self.num_factors] = factor
        self.num_factors += 1

    def _neighbours(self, variable: int) -> set[int]:
        return {v for factor in self.buckets[variable].values() for v in factor.variables}

    def _entries(self, variable: int) -> int:
        return prod([self.sizes[v] for v in self._neighbours(variable)])

    def run(self) -> tuple[int, ...]:
        # The variable whose table would be smallest goes first (the min-weight order of
        # elimination). Costs change as neighbours go, and heaps cannot update: stale entries are
        # skipped.
        present = [self._entries(v) for v in range(len(self.sizes))]
        queue = [(entries, v) for v, entries in enumerate(present)]
        heapq.heapify(queue)
        done: set[int] = set()
        while queue:
            entries, variable = heapq.heappop(queue)
            # Whenever the entries of a variable change, it is queued anew.
            if variable in done or entries != present[variable]:
                continue
            if entries > self.max_entries:
                # Even the smallest table is too large. A neighbour is held, which takes an axis
                # from it, and the variable is tried again. Its entry has left the queue: 0 is never
                # its count, so that it is queued anew below even if its count is what it was.
                touched = self._hold(variable)
                present[variable] = 0
                done.update(self.held)
            else:
                touched = self._eliminate(variable)
                done.add(variable)
            for other in touched - done:
                now = self._entries(other)
                if now != present[other]:
                    present[other] = now
                    heapq.heappush(queue, (now, other))
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
            self.made.append((variable, (), np.zeros((), dtype=np.int32)))
            return set()
        choice, least = self.shared.minimum(factors, order)
        self.made.append((variable, rest, choice))
        if rest:
            self._add(Factor(rest, least))
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
                self._add(Factor(rest, self.shared.slice(factor.table, at, value)))
        return touched

    def _read_back(self) -> tuple[int, ...]:
        # Backwards: where a variable's minimum is depends on variables that were eliminated after
        # it (`rest`), or held, and these are known by then.
        values = list(self.present)
        for variable, value in self.held.items():
            values[variable] = value
        for variable, rest, choice in reversed(self.made):
            values[variable] = int(choice[tuple(values[v] for v in rest)])
        return tuple(values)


def _without_constants(factor: Factor, sizes: Sequence[int]) -> Factor:
    """Return the factor over the variables that have a choice; the others would only cost axes."""
    kept = tuple(variable for variable in factor.variables if sizes[variable] > 1)
    if kept == factor.variables:
        return factor
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
