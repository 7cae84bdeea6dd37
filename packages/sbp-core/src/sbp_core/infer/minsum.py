"""Min-sum problems: discrete variables, cost tables over few of them, least total cost.

Minimise   F(x) = sum_f table_f[x restricted to the variables of f]

Solved by *bucket elimination*: take a variable away, replace the tables that mention it by one
table of their minimum over it, and go on until none is left; then read the variables off backwards.
This is exact. Its tables grow with the width of the graph. If the next one would be larger than a
limit, a variable is *held* at its present value and the elimination goes on with the rest. The
result is exact given the held variables, so the total never rises. Rounds hold different variables
until no round gains. Repeated layers of a network bring equal tables, whose sums and minima are
computed once and shared. This module knows nothing of SBP.

`Buckets` is the elimination itself, which also bounds (`sbp_planner.choice.prove`).

Source: Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence
113 (1999), section 4; Jia et al., "Exploring hidden dimensions in parallelizing convolutional
neural networks", ICML 2018, section 5 (node elimination).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

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

    def aligned(self, order: Sequence[int]) -> Table:
        """Return the table with its axes in an order of variables, with extent 1 for the others.

        Args:
            order: All of its variables, and possibly others.
        """
        place = [order.index(v) for v in self.variables]
        shape = [1] * len(order)
        for at, extent in zip(place, self.table.shape, strict=True):
            shape[at] = extent
        return self.table.transpose(sorted(range(len(place)), key=place.__getitem__)).reshape(shape)


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
        start: A value of each variable, best an assignment that the tables allow.
        max_entries: Most entries of a table; beyond it variables are held.
        max_rounds: Most rounds while some variables must be held; the search also ends after two
            rounds in a row without gain.

    Returns:
        The best values found. A cost of `inf` means that no assignment is allowed (if exact), or
        that none was found.
    """
    # A round holds variables at the values of the best solution so far, so it can find that
    # solution again: no round is worse. It prefers variables that were held least often, so that a
    # variable that could not change in one round can change in another:
    #
    #     chain-like graph    nothing is held                       round 1 is exact
    #     dense graph         round 1 holds {a, b} as they are      the rest is optimal for that
    #                         round 2 holds {c, d} instead          a and b may move now
    best = Solution(values=tuple(start), cost=total_cost(factors, start), exact=False)
    times_held = [0] * len(sizes)
    idle = 0
    shared = _Shared()
    own = [shared.interned(factor) for factor in factors]
    for _ in range(max_rounds):
        holding = _Holding(sizes, own, best.values, times_held, shared)
        values = holding.solved(max_entries)
        cost = total_cost(factors, values)
        if not holding.held:
            return Solution(values=values, cost=cost, exact=True)
        for variable in holding.held:
            times_held[variable] += 1
        idle = 0 if cost < best.cost else idle + 1
        if cost < best.cost:
            best = Solution(values=values, cost=cost, exact=False)
        # One round without gain may have held the wrong variables; two in a row end the search.
        if idle == 2:
            break
    return best


class Buckets:
    """Cost tables, indexed by their variables; variables are eliminated from them.

    Args:
        sizes: Number of values of each variable; variables with one value take no axis of a table.
        factors: The cost tables.

    Attributes:
        sizes: Number of values of each variable.
        left: The variables that are not eliminated yet.
        constant: The cost of tables without remaining variables.
    """

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor]) -> None:
        self.sizes = list(sizes)
        self.left = set(range(len(sizes)))
        self.constant = 0.0
        # A bucket has the factors that mention a variable; a factor is in the bucket of each of its
        # variables, under one number, so that it can be taken out of all of them.
        self._buckets: list[dict[int, Factor]] = [{} for _ in sizes]
        self._number = 0
        # For each eliminated variable, in order: its best value, as a table over the variables that
        # shared tables with it.
        self._taken: list[tuple[int, tuple[int, ...], Choice]] = []
        for factor in factors:
            self.add(factor)

    @property
    def factors(self) -> list[Factor]:
        """The remaining tables, in the order in which they were added."""
        found = {number: factor for bucket in self._buckets for number, factor in bucket.items()}
        return [found[number] for number in sorted(found)]

    def add(self, factor: Factor) -> None:
        """Add a table, without the axes of variables that have no choice."""
        kept = tuple(v for v in factor.variables if self.sizes[v] > 1)
        if kept != factor.variables:
            factor = Factor(kept, factor.table.reshape([self.sizes[v] for v in kept]))
        if not kept:
            self.constant += float(factor.table)
        for variable in kept:
            self._buckets[variable][self._number] = factor
        self._number += 1

    def neighbours(self, variable: int) -> set[int]:
        """Return the variables of all tables of a variable, itself among them if it has any."""
        return {v for factor in self._buckets[variable].values() for v in factor.variables}

    def take(self, variable: int) -> list[Factor]:
        """Remove and return the tables of a variable, in the order in which they were added."""
        taken = list(self._buckets[variable].items())
        for number, factor in taken:
            for v in factor.variables:
                del self._buckets[v][number]
        return [factor for _, factor in taken]

    def least(self, factors: Sequence[Factor], order: tuple[int, ...]) -> tuple[Choice, Table]:
        """Minimise the sum of some factors over the last of `order`; return choice and minimum.

        Args:
            factors: At least one factor.
            order: All of their variables.
        """
        # The eliminated variable is the last axis; broadcasting makes the sum.
        table = reduce(np.add, (factor.aligned(order) for factor in factors))
        choice = table.argmin(axis=-1)
        least = np.take_along_axis(table, choice[..., None], axis=-1)[..., 0]
        # This dtype holds any number of choices that tables may have.
        return choice.astype(np.int32), least

    def eliminate(self, variable: int) -> set[int]:
        """Eliminate a variable at its best value; return the variables that shared its tables."""
        self.left.discard(variable)
        factors = self.take(variable)
        rest = tuple(sorted({v for f in factors for v in f.variables} - {variable}))
        if not factors:
            self._taken.append((variable, (), np.zeros((), dtype=np.int32)))
            return set()
        choice, least = self.least(factors, (*rest, variable))
        self._taken.append((variable, rest, choice))
        self.add(Factor(rest, least))
        return set(rest)

    def smallest_first(self, visit: Callable[[int, int], set[int] | None]) -> None:
        """Visit the variables in the order of their tables, the smallest first (min-weight order).

        Args:
            visit: Called with a variable and the number of entries of the table over its
                neighbours. Returns the variables whose tables changed; None ends the visits. A
                variable that is not eliminated by it is visited again.
        """

        # Entries change as neighbours are eliminated. Heaps cannot update: stale ones are skipped.
        def entries(variable: int) -> int:
            return prod([self.sizes[v] for v in self.neighbours(variable)])

        present = {variable: entries(variable) for variable in self.left}
        queue = [(count, variable) for variable, count in present.items()]
        heapq.heapify(queue)
        while queue:
            count, variable = heapq.heappop(queue)
            # Whenever the entries of a variable change, it is queued again.
            if variable not in self.left or count != present[variable]:
                continue
            touched = visit(variable, count)
            if touched is None:
                return
            # The variable has left the queue. 0 is never a count, so it is queued again below even
            # if its count is unchanged.
            present[variable] = 0
            for other in touched & self.left:
                now = entries(other)
                if now != present[other]:
                    present[other] = now
                    heapq.heappush(queue, (now, other))

    def read_back(self, places: Sequence[int]) -> list[int]:
        """Return the places of the values of all variables, eliminated variables at their best.

        Args:
            places: Places for the remaining variables; arbitrary for others.
        """
        # Backwards: the best value of a variable depends on variables eliminated after it.
        found = list(places)
        for variable, rest, choice in reversed(self._taken):
            found[variable] = int(choice[tuple(found[v] for v in rest)])
        return found


class _Shared:
    """Results that are shared by equal tables; they live as long as this, so ids identify them.

    before: layer 1 takes x1 from f(x1, y1), g(x1, z1)    layer 2 takes x2 from f(x2, y2), g(x2, z2)
    after:  h(y, z) = min over x of f(x, y) + g(x, z) is made for layer 1, and named h(y2, z2) too
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[tuple[int, ...], bytes], Table] = {}
        self.minima: dict[object, tuple[Choice, Table]] = {}
        self._slices: dict[tuple[int, int, int], Table] = {}

    def interned(self, factor: Factor) -> Factor:
        """Return the factor with the first table that was equal to its own, bit by bit.

        Variables without a choice are left out: they would only cost axes.
        """
        table = factor.table
        kept = tuple(v for v, n in zip(factor.variables, table.shape, strict=True) if n > 1)
        key = tuple(n for n in table.shape if n > 1), table.tobytes()
        return Factor(kept, self._tables.setdefault(key, table.reshape(key[0])))

    def slice(self, table: Table, axis: int, index: int) -> Table:
        """Return a table at one index of one axis."""
        key = (id(table), axis, index)
        if key not in self._slices:
            self._slices[key] = np.asarray(table.take(index, axis=axis))
        return self._slices[key]


class _Holding(Buckets):
    """One elimination of all variables, holding some at `present` if tables grow too large."""

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        present: Sequence[int],
        times_held: Sequence[int],
        shared: _Shared,
    ) -> None:
        super().__init__(sizes, factors)
        self.present, self.times_held, self.shared = present, times_held, shared
        self.held: list[int] = []

    def least(self, factors: Sequence[Factor], order: tuple[int, ...]) -> tuple[Choice, Table]:
        """See `Buckets.least`."""
        place = {variable: at for at, variable in enumerate(order)}
        # The names of variables do not matter, only which axis of which table belongs to which
        # place in `order`. Equal tables are one object (`interned`; minima and slices of equal
        # tables, too), so ids identify equal tables, and later layers reuse the minimum of the
        # first.
        key = tuple((id(f.table), tuple(place[v] for v in f.variables)) for f in factors)
        found = self.shared.minima.get(key)
        if found is None:
            found = self.shared.minima[key] = super().least(factors, order)
        return found

    def solved(self, max_entries: int) -> tuple[int, ...]:
        """Return the best values of all variables, given the held ones."""
        # If even the smallest table is too large, a neighbour is held, which removes an axis, and
        # the variable is tried again.
        self.smallest_first(
            lambda variable, entries: (
                self.eliminate(variable) if entries <= max_entries else self._hold(variable)
            )
        )
        return tuple(self.read_back(self.present))

    def _hold(self, around: int) -> set[int]:
        """Hold the most connected neighbour of `around` that was held least often so far."""
        chosen = min(
            self.neighbours(around), key=lambda v: (self.times_held[v], -len(self._buckets[v]), v)
        )
        value = self.present[chosen]
        self.held.append(chosen)
        self.left.discard(chosen)
        self._taken.append((chosen, (), np.asarray(value, dtype=np.int32)))
        touched: set[int] = set()
        for factor in self.take(chosen):
            at = factor.variables.index(chosen)
            rest = factor.variables[:at] + factor.variables[at + 1 :]
            touched.update(rest)
            self.add(Factor(rest, self.shared.slice(factor.table, at, value)))
        return touched
