"""Prove that no plan for a step beats a known one by more than a gap, or find one that does.

The joint search (`joint.search`) calls this. An assignment gives each variable, such as the split
of an operator, a value; cost tables add up to the time.

    bound by moved costs (`moved_costs`)          595.0 of 597.0 ms
    a value that is in no assignment below 597    595.0 + what it adds > 597.0: struck out
    fewer values, smaller tables                  variables are eliminated, exactly
    ... until none is left                        597.0 ms: the cheapest, because all is known

The three steps support each other. Struck-out values make tables small enough to eliminate
variables. Elimination leaves fewer and larger tables, between which costs travel further. And the
nearer the bound, the more values are struck out. No step loses an assignment that costs less than
the one to be proved (less the gap). So any of three ends is a proof: a bound that is near enough, a
variable without values, or no variable left.

If it comes to a halt before, the rest is eliminated in *mini-buckets*: where a table would be too
large, several tables replace it, each minimised by itself, so the result is a bound. The caller may
continue with that.

Source: Savchynskyy, "Discrete graphical models: an optimization perspective", Foundations and
Trends in Computer Graphics and Vision 11 (2019), chapters 6 and 8 (dual block-coordinate ascent,
partial optimality); in integer programming, striking out values is known as reduced-cost fixing,
Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman problem", 1954;
Dechter and Rish, "Mini-buckets", Journal of the ACM 50 (2003).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from time import monotonic

import numpy as np

from sbp_core.infer import FORBIDDEN_S, Buckets, Factor, minimise, total_cost
from sbp_planner.choice.moved_costs import MovedCosts, TableTerm, graph_order, minima_along
from sbp_planner.choice.problem import Ints

#: Sizes of tables of an elimination: at first, and each time that nothing else helps.
_MAX_ENTRIES = (1 << 16, 1 << 18, 1 << 20)

#: Sweeps between two attempts to eliminate variables.
_NUM_SWEEPS = 5

#: These sweeps gained too little if the gain is less than this share of the remaining gap.
_LEAST_GAIN = 0.02

#: Sums in another order differ by less than this share.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalityProof:
    """The cheapest known assignment, and a bound.

    Args:
        values: The best known assignment.
        cost: Its cost.
        bound: No assignment costs less.
    """

    values: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much less an assignment might cost, at most, as a share of the cost."""
        return max(self.cost - self.bound, 0.0) / self.cost if self.cost > 0 else 0.0


class StruckBuckets(Buckets):
    """Buckets whose values may be struck out.

    Attributes:
        allowed: For each variable the values that are not struck out; tables are over these.
    """

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor]) -> None:
        super().__init__(sizes, factors)
        self.allowed: list[Ints] = [np.arange(size) for size in sizes]

    def eliminate_small(self, max_entries: int) -> None:
        """Eliminate variables while the table over all neighbours of one is small enough.

        Args:
            max_entries: Most entries of that table, with the variable itself.
        """
        self.smallest_first(lambda v, count: self.eliminate(v) if count <= max_entries else None)

    def strike(self, kept: Sequence[Ints], factors: Iterable[Factor]) -> None:
        """Strike out values of the remaining variables.

        Args:
            kept: For each variable the indices of the kept values.
            factors: Tables over these, of the same cost for every remaining assignment.
        """
        fewer = {v for v in self.left if len(kept[v]) < self.sizes[v]}
        for v in fewer:
            self.allowed[v] = self.allowed[v][kept[v]]
            self.sizes[v] = len(kept[v])
        for at, (variable, rest, choice) in enumerate(self._taken):
            for axis in [axis for axis, v in enumerate(rest) if v in fewer]:
                choice = choice.take(kept[rest[axis]], axis=axis)
            self._taken[at] = variable, rest, choice
        for bucket in self._buckets:
            bucket.clear()
        for factor in factors:
            self.add(factor)

    def merged(self) -> list[Factor]:
        """Return the tables, each added to a table over more variables that include its own."""
        found = dict(enumerate(self.factors))
        of: list[set[int]] = [set() for _ in self.sizes]
        for key, factor in found.items():
            for v in factor.variables:
                of[v].add(key)
        for key in sorted(found, key=lambda at: len(found[at].variables)):
            others = set.intersection(*(of[v] for v in found[key].variables)) - {key}
            larger = [at for at in others if at in found]
            if larger:
                into = found[at := min(larger, key=lambda at: (found[at].table.size, at))]
                more = found.pop(key).aligned(into.variables)
                found[at] = Factor(into.variables, into.table + more)
        return list(found.values())

    def places(self, values: Sequence[int]) -> tuple[int, ...] | None:
        """Return the index of each variable's value among the allowed ones; None if one is not.

        For eliminated variables it is 0.
        """
        found = [0] * len(self.allowed)
        for v in self.left:
            at = np.flatnonzero(self.allowed[v] == values[v])
            if not len(at):
                return None
            found[v] = int(at[0])
        return tuple(found)

    def expanded(self, places: Sequence[int]) -> tuple[int, ...]:
        """Return the values of all variables, eliminated ones at their best.

        Args:
            places: Indices of the values of the remaining variables; any for eliminated ones.
        """
        places = self.read_back(places)
        return tuple(int(of[at]) for of, at in zip(self.allowed, places, strict=True))


class MiniBuckets(Buckets):
    """Buckets that eliminate all variables, with tables up to a size: a bound."""

    def bounded(self, max_entries: int) -> float:
        """Return the bound; all variables are eliminated."""
        self.smallest_first(lambda variable, _: self._eliminate(variable, max_entries))
        return self.constant

    def _eliminate(self, variable: int, max_entries: int) -> set[int]:
        self.left.discard(variable)
        parts: list[tuple[set[int], list[Factor]]] = []
        for factor in sorted(self.take(variable), key=lambda one: -one.table.size):
            for joint, part in parts:
                more = joint | set(factor.variables)
                if prod([self.sizes[v] for v in more]) <= max_entries:
                    joint |= more
                    part.append(factor)
                    break
            else:
                parts.append((set(factor.variables), [factor]))
        scopes = [tuple(sorted(joint - {variable})) for joint, _ in parts]
        sums = [
            reduce(np.add, (factor.aligned((*scope, variable)) for factor in part))
            for scope, (_, part) in zip(scopes, parts, strict=True)
        ]
        if len(sums) > 1:
            # The mini-buckets are made to agree as far as possible.
            least = [minima_along(table, table.ndim - 1) for table in sums]
            mean = reduce(np.add, least) / len(least)
            possible = np.isfinite(mean)
            sums = [
                table + np.where(possible, mean - np.where(possible, own, 0.0), inf)
                for table, own in zip(sums, least, strict=True)
            ]
        for scope, table in zip(scopes, sums, strict=True):
            self.add(Factor(scope, np.asarray(table.min(axis=-1))))
        return {v for scope in scopes for v in scope}


def prove(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    values: Sequence[int],
    *,
    gap: float = 0.0,
    deadline: float,
    cutoff: float = inf,
) -> OptimalityProof:
    """Return a proof that an assignment is the cheapest, or a cheaper one and its proof.

    Args:
        sizes: Number of values of each variable.
        factors: The cost tables.
        values: A good assignment, such as the result of `minimise`: the better, the faster.
        gap: Share of its cost that is not worth a proof, >= 0.
        deadline: Time of `time.monotonic` at which the bound so far is returned, in s.
        cutoff: A cost known from elsewhere: assignments that cost no less do not matter, and a
            bound that reaches it is a proof.
    """
    return _Prover(sizes, factors, values, gap, cutoff).run(deadline)


class _Prover:
    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        values: Sequence[int],
        gap: float,
        cutoff: float,
    ) -> None:
        self.factors, self.gap, self.cutoff = factors, gap, cutoff
        self.best, self.cost = tuple(values), total_cost(factors, values)
        self.order = graph_order(len(sizes), [factor.variables for factor in factors])
        allowed = [
            Factor(f.variables, np.where(f.table >= FORBIDDEN_S, inf, f.table)) for f in factors
        ]
        self.buckets = StruckBuckets(sizes, allowed)

    @property
    def wanted(self) -> float:
        """The bound that is enough; values of larger cost are struck out."""
        return min(self.cost, self.cutoff) * (1 - self.gap)

    def run(self, deadline: float) -> OptimalityProof:
        buckets, bound, level = self.buckets, -inf, 0
        while monotonic() < deadline and level < len(_MAX_ENTRIES):
            buckets.eliminate_small(_MAX_ENTRIES[level])
            if not buckets.left:
                # The result is the cheapest assignment that was not struck out.
                wanted = self.wanted
                if np.isfinite(buckets.constant):
                    self._take(buckets.expanded([0] * len(buckets.sizes)))
                is_enough = buckets.constant >= wanted * (1 - _ROUNDING)
                return self._proved(wanted if is_enough else buckets.constant)
            terms = [TableTerm(factor) for factor in buckets.merged()]
            costs = MovedCosts(buckets.sizes, terms, self.order)
            before = bound
            for _ in range(_NUM_SWEEPS):
                costs.sweep(deadline)
                bound = max(bound, buckets.constant + costs.bound)
                if bound >= self.wanted * (1 - _ROUNDING):
                    return self._proved(self.wanted)
                if not costs.strike(self.wanted * (1 + _ROUNDING) - buckets.constant):
                    return self._proved(self.wanted)
            buckets.strike(costs.kept, [Factor(term.variables, term.table) for term in terms])
            if bound - before < _LEAST_GAIN * (self.wanted - bound):
                self._improve()
                level += 1
        rest = MiniBuckets(buckets.sizes, buckets.factors).bounded(_MAX_ENTRIES[-1])
        return self._proved(max(bound, buckets.constant + rest))

    def _improve(self) -> None:
        """Look for a cheaper assignment among the remaining values."""
        buckets = self.buckets
        start = buckets.places(self.best) or (0,) * len(buckets.sizes)
        factors = [
            Factor(f.variables, np.where(np.isfinite(f.table), f.table, FORBIDDEN_S))
            for f in buckets.factors
        ]
        found = minimise(buckets.sizes, factors, start, max_entries=_MAX_ENTRIES[0])
        self._take(buckets.expanded(found.values))

    def _take(self, values: tuple[int, ...]) -> None:
        cost = total_cost(self.factors, values)
        if cost < self.cost:
            self.best, self.cost = values, cost

    def _proved(self, bound: float) -> OptimalityProof:
        return OptimalityProof(values=self.best, cost=self.cost, bound=min(bound, self.cost))
