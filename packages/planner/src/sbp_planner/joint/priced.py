"""Find fast plans for a step under a memory limit, by a price on memory (Lagrangian relaxation).

    minimise    cost(x) + price * sum_v usage_v(x_v) share_v                             [s]

share_v is the part of the *full* places at which v is alive. A place is full if the cheapest
assignment holds more than the limit there. The higher the price, the less an assignment holds. Each
price takes one elimination of the tied step (`sbp_core.infer.minimise`), so this works for steps
that are too large for an integer program with memory. Take an assignment that holds too much, and
one that does not. The next price is the one at which the two have equal priced costs. This is
repeated until no assignment between them is better:

    cost            a  holds too much
      |              .
      |               .  .  c   is found at the price at which a and b are equal
      |                       .  b  keeps to the limit
      +------------------------------ memory

The result is no optimum: assignments above the line between two prices are not found. The bound of
the step without memory holds all the same.

Source: Everett, "Generalized Lagrange multiplier method for solving problems of optimum allocation
of resources", Operations Research 11 (1963); the prices: Handler and Zang, "A dual algorithm for
the constrained shortest path problem", Networks 10 (1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, CostTables, Factor, StepProblem, minimise
from sbp_planner.joint.layers import TiedStep
from sbp_planner.joint.lifetime import VariableMemory

Bytes = NDArray[np.float64]

#: How many prices are tried for one limit, at most.
_MAX_PRICES = 12

#: The factor by which a price that is too low is raised, and the largest factor in all.
_RAISE, _HIGHEST = 8.0, 1e6

#: Rounds of elimination for each price.
_MAX_ROUNDS = 3

#: No further price is tried if it could gain less than this share of the cost.
_LEAST_GAIN = 2e-4


class _Found(NamedTuple):
    """An assignment that is the cheapest at some price.

    Args:
        values: The values of all variables of the step.
        cost_s: Its cost without the price.
        priced_bytes: The bytes for which the price is paid.
        peak_bytes: The most bytes it holds, as counted.
    """

    values: tuple[int, ...]
    cost_s: float
    priced_bytes: float
    peak_bytes: float


class PricedMemory:
    """A step whose memory has a price; assignments are kept from limit to limit.

    Args:
        problem: The step.
        step: The step with equal layers tied.
        memory: What values hold, and the first limit that is needed.
        free: The cheapest assignment without a limit.
        max_entries: Most entries of a table.
    """

    def __init__(
        self,
        problem: StepProblem,
        step: TiedStep,
        memory: VariableMemory,
        free: Sequence[int],
        *,
        max_entries: int,
    ) -> None:
        self.problem, self.step, self.memory = problem, step, memory
        self.max_entries = max_entries
        self.tables = CostTables(step, max_entries=max_entries)
        self.shares, self.held_bytes = self._priced_bytes(free)
        first = self._noted(tuple(free))
        self.found: list[_Found] = [first]
        #: The price to try next if no assignment so far keeps to a limit; and the last one, which
        #: is so high that only memory matters.
        self.price = first.cost_s / max(first.peak_bytes, 1)
        self.highest = _HIGHEST * self.price

    def within(self, limit_bytes: float) -> tuple[int, ...] | None:
        """Return a cheap assignment that keeps to a limit; None if no price leads to one.

        Args:
            limit_bytes: The most bytes that may be held at any place, as counted.
        """
        # Raise the price until it is high enough. The price is on the full places alone, so the
        # highest price does not give the lowest peak.
        while not any(one.peak_bytes <= limit_bytes for one in self.found):
            if self.price > self.highest:
                return None
            self._cheapest(self.price)
            self.price *= _RAISE

        def cheapest() -> _Found:
            fitting = [one for one in self.found if one.peak_bytes <= limit_bytes]
            return min(fitting, key=lambda one: one.cost_s)

        for _ in range(_MAX_PRICES):
            below = cheapest()
            # The leanest of the assignments that hold too much.
            over = [
                one
                for one in self.found
                if one.peak_bytes > limit_bytes and one.cost_s < below.cost_s
            ]
            if not over:
                break
            above = min(over, key=lambda one: (one.priced_bytes, one.cost_s))
            gained_s = below.cost_s - above.cost_s
            more_bytes = above.priced_bytes - below.priced_bytes
            if gained_s <= _LEAST_GAIN * below.cost_s or more_bytes <= 0:
                break
            price = gained_s / more_bytes
            known = {above.values, below.values}
            one = self._cheapest(price)
            equal = below.cost_s + price * below.priced_bytes
            if one.values in known or one.cost_s + price * one.priced_bytes >= equal * (1 - 1e-9):
                break
        return cheapest().values

    def leanest(self) -> tuple[int, ...]:
        """Return the assignment that holds least, of all that were found."""
        return min(self.found, key=lambda one: one.peak_bytes).values

    def _priced_bytes(self, free: Sequence[int]) -> tuple[list[float], list[Bytes]]:
        """Return the shares, and for each tied variable the priced bytes of its values."""
        memory = self.memory
        full = np.flatnonzero(memory.by_place(free) > memory.limit_bytes)
        found: list[Bytes] = [np.zeros(len(table)) for table in self.step.unary]
        shares = []
        for variable, usage, (start, end) in zip(
            memory.variables, memory.usages, memory.intervals, strict=True
        ):
            of = self.step.tied[variable]
            share = np.count_nonzero((full >= start) & (full < end)) / max(len(full), 1)
            shares.append(float(share))
            if share:
                found[of] = found[of] + share * usage
        return shares, found

    def _noted(self, values: tuple[int, ...]) -> _Found:
        memory = self.memory
        usages = zip(self.shares, memory.variables, memory.usages, strict=True)
        return _Found(
            values=values,
            cost_s=self.problem.cost(values),
            priced_bytes=sum(share * float(usage[values[v]]) for share, v, usage in usages),
            peak_bytes=self.memory.peak_bytes(values),
        )

    def _cheapest(self, price: float) -> _Found:
        """Find the cheapest assignment at a price in seconds for each byte, and keep it."""
        priced = [
            Factor((v,), price * held) for v, held in enumerate(self.held_bytes) if held.any()
        ]
        found = minimise(
            self.tables.sizes,
            [*self.tables.factors, *priced],
            self.tables.start,
            max_entries=self.max_entries,
            max_rounds=_MAX_ROUNDS,
        )
        one = self._noted(self.step.expanded(found.values))
        if one.cost_s < FORBIDDEN_S:
            self.found.append(one)
        return one
