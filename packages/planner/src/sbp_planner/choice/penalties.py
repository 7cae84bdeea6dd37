"""Assignments that fit, from ones that do not: bytes above capacity cost what makes them go.

    penalty of a row     rises while the row is above its capacity, and stays where it is not
    a move               some pieces of a forest, if cost and penalties together fall (see `moves`)

Rows that are near their capacity are priced when pieces are proposed, too, by a part of their
penalty that is drawn anew each time: enough to keep them below, or little enough to let others in.

An assignment that fits gets better so as well: penalties are lowered, in some stretch of time or
everywhere, and rise again until it fits (*oscillation*).

Source: Glover and Hao, "The case for strategic oscillation", Annals of Operations Research 183
(2011); Morris, "The breakout method for escaping from local minima", AAAI 1993 (penalties that
rise).
"""

from __future__ import annotations

import time

import numpy as np

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.moves import TreeMoves
from sbp_planner.choice.problem import Floats, Ints

#: By which factor the penalty of a row above its capacity rises from forest to forest, and what is
#: added for each part above, in terms of a usual price.
_RISE = 1.25
_ADDED = 1.0

#: A row is near its capacity if no more than this part of it is free.
_NEAR = 0.02

#: Forests without less bytes above capacity that are enough.
_VAIN = 60

#: Forests with lowered penalties, and by which factor they are lowered, at least and at most.
_LOW_FORESTS = 4
_LOWERED = (0.2, 0.9)

#: By how much the logarithm of the prices varies from forest to forest.
_PRICE_SPREAD = 0.25


class Penalties:
    """Penalties of the rows of one problem, and what they bring about.

    Args:
        compact: The problem.
        trees: What moves.
        usual: A price that makes the memory of a row as dear as a node, in cost a byte.
        seed: Of the random numbers.

    Attributes:
        penalty: Of each row, in cost a byte, float64.
    """

    def __init__(self, compact: Compact, trees: TreeMoves, usual: float, seed: int = 0) -> None:
        self.compact = compact
        self.trees = trees
        self.usual = usual
        self.random = np.random.default_rng(seed)
        self.penalty = np.zeros(len(compact.capacity))
        self._capacity = np.maximum(compact.capacity, 1).astype(np.float64)

    def fitted(self, values: Ints, prices: Floats, until: float) -> Ints:
        """Return an assignment that fits, or that exceeds capacities least of those that were met.

        Args:
            values: To begin with.
            prices: λ of each row, in cost a byte.
            until: Of `time.monotonic`, in s.
        """
        self.penalty = np.maximum(self.penalty, prices)
        best, least, vain = values, self._above(values), 0
        while least > 0 and vain < _VAIN and time.monotonic() < until:
            self._raise(values)
            values = self._eased(values, prices)
            above = self._above(values)
            vain += 1
            if above < least:
                best, least, vain = values, above, 0
        return best

    def oscillated(self, values: Ints, prices: Floats, until: float) -> Ints:
        """Return what becomes of an assignment if it may exceed capacities for a while."""
        penalty = self.penalty
        factor = np.full(len(penalty), self.random.uniform(*_LOWERED))
        if self.random.random() < 0.7 and len(penalty):
            # Only in a stretch of time; the rest stays as dear as it is.
            width = int(np.exp(self.random.uniform(0, np.log(len(penalty) + 1))))
            first = int(self.random.integers(max(len(penalty) - width, 0) + 1))
            factor[:first] = factor[first + width :] = 1.0
        self.penalty = np.maximum(penalty, prices) * factor
        for _ in range(_LOW_FORESTS):
            if time.monotonic() >= until:
                break
            values = self._eased(values, prices * factor)
        self.penalty = np.maximum(self.penalty, 0.5 * prices)
        return self.fitted(values, prices, until)

    def _eased(self, values: Ints, prices: Floats) -> Ints:
        excess = self.compact.excess(values)
        near = np.clip(1 + excess / (_NEAR * self._capacity), 0, 1)
        part = np.where(excess > 0, 1.0, near * self.random.random())
        spread = np.exp(self.random.uniform(-1, 1) * _PRICE_SPREAD)
        proposed_by = np.maximum(spread * prices * (near > 0), part * self.penalty)
        return self.trees.eased(values, proposed_by, self.penalty)

    def _raise(self, values: Ints) -> None:
        above = np.maximum(self.compact.excess(values), 0) / self._capacity
        self.penalty = np.where(
            above > 0, self.penalty * _RISE + _ADDED * self.usual * above, self.penalty
        )

    def _above(self, values: Ints) -> float:
        if not len(self._capacity):
            return 0.0
        return float((np.maximum(self.compact.excess(values), 0) / self._capacity).sum())
