"""Assignments within a limit of memory, by a price on it: Lagrangian relaxation.

    minimise    cost(x) + price * sum_v usage_v(x_v) share_v                             [s]

share_v is the part of the *full* places, at which the cheapest assignment holds more than the
limit, that v is alive at. The higher the price, the less an assignment holds; the lowest price
whose assignment keeps to the limit is found by doubling and halving, and the cheapest that keeps
to it is taken. Each price is an elimination of the tied step (`sbp_core.infer.minimise`), so this
goes where an integer program with memory in it does not.

What it finds is no optimum: assignments between those of two prices are not seen. The bound of the
step without memory holds all the same.

Source: Everett, "Generalized Lagrange multiplier method for solving problems of optimum allocation
of resources", Operations Research 11 (1963).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, CostTables, Factor, StepProblem, minimise
from sbp_planner.joint.layers import TiedStep
from sbp_planner.joint.lifetime import Held

#: Prices that are doubled, and halved between two, at most.
_MAX_DOUBLINGS, _MAX_HALVINGS = 16, 6

#: Of elimination, for each price.
_MAX_ROUNDS = 3


class PricedMemory:
    """A step whose memory has a price.

    Args:
        problem: The step.
        step: With its equal layers alike.
        max_entries: Of the largest table.
    """

    def __init__(self, problem: StepProblem, step: TiedStep, *, max_entries: int) -> None:
        self.problem, self.step, self.max_entries = problem, step, max_entries
        self.tables = CostTables(step, max_entries=max_entries)

    def within(self, memory: Held, free: Sequence[int]) -> tuple[int, ...] | None:
        """Return a cheap assignment that keeps to a limit; None if no price leads to one.

        Args:
            memory: What values hold, and the limit.
            free: The cheapest assignment without a limit.
        """
        held_bytes = self._priced_bytes(memory, free)
        price = self.problem.cost(free) / max(memory.peak_bytes(free), 1)
        low, best = 0.0, None
        for _ in range(_MAX_DOUBLINGS):
            values = self._cheapest(price, held_bytes)
            if memory.peak_bytes(values) <= memory.limit_bytes:
                best = values
                break
            low, price = price, 2 * price
        if best is None:
            return None
        high = price
        for _ in range(_MAX_HALVINGS):
            price = (low + high) / 2
            values = self._cheapest(price, held_bytes)
            if memory.peak_bytes(values) > memory.limit_bytes:
                low = price
                continue
            high = price
            if self.problem.cost(values) < self.problem.cost(best):
                best = values
        return best if self.problem.cost(best) < FORBIDDEN_S else None

    def _priced_bytes(self, memory: Held, free: Sequence[int]) -> list[NDArray[np.float64]]:
        """Return for each tied variable the bytes at full places of each of its values."""
        full = np.flatnonzero(memory.by_place(free) > memory.limit_bytes)
        found = [np.zeros(len(table)) for table in self.step.unary]
        for variable, of in enumerate(self.step.tied):
            start, end = memory.intervals[variable]
            share = np.count_nonzero((full >= start) & (full < end)) / max(len(full), 1)
            if share:
                found[of] = found[of] + share * memory.usages[variable]
        return found

    def _cheapest(self, price: float, held_bytes: list[NDArray[np.float64]]) -> tuple[int, ...]:
        """Return the cheapest assignment at a price in seconds for each byte."""
        priced = [Factor((v,), price * held) for v, held in enumerate(held_bytes) if held.any()]
        found = minimise(
            self.tables.sizes,
            [*self.tables.factors, *priced],
            self.tables.start,
            max_entries=self.max_entries,
            max_rounds=_MAX_ROUNDS,
        )
        return self.step.expanded(found.values)
