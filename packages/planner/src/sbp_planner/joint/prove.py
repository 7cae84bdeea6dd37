"""Proof of an assignment: no other costs less by more than a gap, or here is one that does.

    bound by moved costs (`joint.bound`)          595.0 of 597.0 ms
    a value that is in no assignment below 597    595.0 + what it adds > 597.0: struck out
    fewer values, smaller tables                  variables are eliminated, exactly
    ... until none is left                        597.0 ms: the cheapest, as all is known

The three feed each other. What is struck out makes tables small enough for variables to be
eliminated; what is eliminated leaves fewer and larger tables, between which costs travel further;
and the nearer the bound, the more is struck out. Nothing of this loses an assignment that costs
less than the one to be proved (less the gap), so the end is a proof whichever way it comes: a
bound that is near enough, a variable without values, or no variable left.

Where it comes to a halt before, what is left is held to the bound of mini-buckets, and the caller
may go on with what it knows.

Source: Savchynskyy, "Discrete graphical models: an optimization perspective", Foundations and
Trends in Computer Graphics and Vision 11 (2019), chapters 6 and 8 (dual block-coordinate ascent,
partial optimality); in integer programming what is struck out is known as reduced-cost fixing,
Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman problem", 1954.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, Factor, minimise, total_cost
from sbp_planner.joint.bound import DualBound, graph_order
from sbp_planner.joint.buckets import Buckets, MiniBuckets, Scoped

#: Sizes of the table of an elimination: at first, and where no more is gained otherwise.
_MAX_ENTRIES = (1 << 16, 1 << 18, 1 << 20)

#: Sweeps between two looks at what can be eliminated.
_NUM_SWEEPS = 5

#: These sweeps gained too little if it is less than this share of the gap that is left.
_LEAST_GAIN = 0.02

#: Sums in another order differ by less than this share.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known of the cheapest assignment.

    Args:
        values: The best assignment that is known.
        cost: What it costs.
        bound: No assignment costs less.
    """

    values: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much less an assignment might cost at most, as a share of the cost."""
        return max(self.cost - self.bound, 0.0) / self.cost if self.cost > 0 else 0.0


def prove(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    values: Sequence[int],
    *,
    gap: float = 0.0,
    deadline: float,
    cutoff: float = np.inf,
) -> Proof:
    """Return a proof that an assignment is the cheapest, or a cheaper one and its proof.

    Args:
        sizes: Number of values of each variable.
        factors: The cost tables.
        values: A good assignment, such as of `minimise`: the better, the faster.
        gap: Share of its cost that is not worth a proof, >= 0.
        deadline: Of `time.monotonic`, at which the bound so far is returned.
        cutoff: What is known elsewhere: assignments that cost no less do not matter, and a bound
            that reaches it is a proof.
    """
    return _Prover(sizes, factors, values, gap, deadline, cutoff).run()


class _Prover:
    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        values: Sequence[int],
        gap: float,
        deadline: float,
        cutoff: float,
    ) -> None:
        self.factors, self.gap, self.deadline = factors, gap, deadline
        self.cutoff = cutoff
        self.best, self.cost = tuple(values), total_cost(factors, values)
        self.order = graph_order(sizes, [factor.variables for factor in factors])
        self.buckets = Buckets(sizes, [_dual_table(factor) for factor in factors])

    @property
    def wanted(self) -> float:
        """The bound that is enough, and what costs more than is struck out."""
        return min(self.cost, self.cutoff) * (1 - self.gap)

    def run(self) -> Proof:
        bound = -np.inf
        level = 0
        while monotonic() < self.deadline:
            self.buckets.eliminate(_MAX_ENTRIES[level])
            if not self.buckets.variables:
                return self._eliminated()
            dual = DualBound(self.buckets.sizes, self.buckets.merged(), self.order)
            before = bound
            for _ in range(_NUM_SWEEPS):
                dual.sweep(self.deadline)
                bound = max(bound, self.buckets.constant + dual.bound)
                if bound >= self.wanted * (1 - _ROUNDING):
                    return self._proved(self.wanted)
                kept = dual.kept(self.wanted * (1 + _ROUNDING) - self.buckets.constant)
                if kept is None:
                    return self._proved(self.wanted)
                dual.restrict(kept)
                self.buckets.restrict(kept)
            self.buckets.replace(dual.scoped)
            if bound - before < _LEAST_GAIN * (self.wanted - bound):
                self._improve()
                level += 1
                if level == len(_MAX_ENTRIES):
                    break
        rest = MiniBuckets(self.buckets.sizes, self.buckets.tables, _MAX_ENTRIES[-1]).run()
        return self._proved(max(bound, self.buckets.constant + rest))

    def _improve(self) -> None:
        """Look for a cheaper assignment among what is left."""
        buckets = self.buckets
        start = buckets.places(self.best) or (0,) * len(buckets.sizes)
        factors = [
            Factor(scope, np.where(np.isfinite(table), table, FORBIDDEN_S))
            for scope, table in buckets.tables
        ]
        found = minimise(buckets.sizes, factors, start, max_entries=_MAX_ENTRIES[0])
        self._take(buckets.expanded(found.values))

    def _take(self, values: tuple[int, ...]) -> None:
        cost = total_cost(self.factors, values)
        if cost < self.cost:
            self.best, self.cost = values, cost

    def _eliminated(self) -> Proof:
        """Return what it means that nothing is left: the cheapest of what was not struck out."""
        least, wanted = self.buckets.constant, self.wanted
        if np.isfinite(least):
            self._take(self.buckets.expanded(()))
        return self._proved(min(least, wanted))

    def _proved(self, bound: float) -> Proof:
        return Proof(values=self.best, cost=self.cost, bound=min(bound, self.cost))


def _dual_table(factor: Factor) -> Scoped:
    table: NDArray[np.float64] = np.where(factor.table >= FORBIDDEN_S, np.inf, factor.table)
    return factor.variables, table
