"""A lower bound on the cost of a step with very many signatures, without tables over several users.

    cost(x) = sum_v unary_v(x_v) + sum over values of (what is paid for distinct targets, each once)

It is the bound of `joint.bound`, by moved costs; only the terms differ. What is paid for one value
depends on its source by what it is made as, *a*, and on each user by the target that it asks for:

    pay(a, t_1 .. t_k) = sum over the distinct t of C[a, t]

A table over all of these would be far too large for three mesh axes (hundreds of a and t), and none
is needed: with potentials g_i(t) of what the users pay otherwise, users that share a target form a
block B, and any partition of the users into blocks is an assignment, so

    F_B(a)  = min over t of  C[a, t] + sum over i in B of g_i(t)
    min_a   = min over the partitions of the users of  sum over their blocks of F_B(a)

which is exact, as blocks that happen to have one target only cost more than their union does. The
partitions are gone through as subsets, so a value with k users takes 2^k passes over C. Users
beyond `MAX_USERS` are put in terms of their own, each of which pays its share of C.

Source: Kolmogorov, "Convergent tree-reweighted message passing", PAMI 28 (2006); Werner, "A linear
programming approach to max-sum problem", PAMI 29 (2007), section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, ConversionGroup, Costed
from sbp_planner.joint.bound import graph_order

Table = NDArray[np.float64]
Numbers = NDArray[np.int64]

#: Users of one value that are looked at together.
MAX_USERS = 6

#: Sweeps between two looks at what can be struck out, and the share of what is left to be proved
#: that they must gain.
NUM_SWEEPS, LEAST_GAIN = 2, 0.05

#: Sums in another order differ by less than this share.
_ROUNDING = 1e-9


class Paid:
    """What is paid for one value, and what its variables pay beside that: one term of the bound.

    Args:
        costs: C, (classes of the source, targets); `inf` forbids.
        classes: The class of each value of the source.
        users: Of each user its targets, for each of its values.
        variables: The source, then the users.
    """

    def __init__(
        self,
        costs: Table,
        classes: Numbers,
        users: Sequence[Numbers],
        variables: tuple[int, ...],
    ) -> None:
        self.costs, self.variables = costs, variables
        self.maps = [classes, *users]
        self.potentials = [np.zeros(len(of)) for of in self.maps]
        #: The least of the potentials, by class of the source, then by target of each user.
        self._least: list[Table] = []
        #: By set of users: what they pay by target if they all ask for it, by class of the source
        #: then, and by class if they ask for what is best.
        self._sums: dict[int, Table] = {}
        self._blocks: dict[int, Table] = {}
        self._bests: dict[int, Table] = {}
        self._compact()

    def _compact(self) -> None:
        """Leave out targets that nobody asks for and classes that no value of the source has."""
        rows, self.maps[0] = np.unique(self.maps[0], return_inverse=True)
        asked = np.unique(np.concatenate(self.maps[1:]))
        number = np.zeros(self.costs.shape[1], dtype=np.int64)
        number[asked] = np.arange(len(asked))
        self.maps[1:] = [number[of] for of in self.maps[1:]]
        self.costs = self.costs[np.ix_(rows, asked)]
        self._least = [self._reduced(place) for place in range(len(self.maps))]
        self._sums = {0: np.zeros(len(asked))}
        self._blocks, self._bests = {}, {0: np.zeros(len(rows))}

    def _reduced(self, place: int) -> Table:
        least = np.full(self.costs.shape[min(place, 1)], inf)
        np.minimum.at(least, self.maps[place], self.potentials[place])
        return least

    def add(self, place: int, shift: Table) -> None:
        """Add to what a variable pays."""
        self.potentials[place] = self.potentials[place] + shift
        self._least[place] = self._reduced(place)
        if place:
            user = 1 << (place - 1)
            for known in (self._sums, self._blocks, self._bests):
                for users in [users for users in known if users & user]:
                    del known[users]

    def minima(self, place: int) -> Table:
        """Return the least of the term for each value of a variable."""
        least = self._of_source() if place == 0 else self._of_user(place - 1)
        found: Table = least[self.maps[place]] + self.potentials[place]
        return found

    @property
    def least(self) -> float:
        """The least of the term."""
        return float((self._of_source() + self._least[0]).min())

    def restrict(self, place: int, kept: Numbers) -> None:
        """Strike out all other values of a variable; `settle` follows when all are told."""
        self.maps[place] = self.maps[place][kept]
        self.potentials[place] = self.potentials[place][kept]

    def settle(self) -> None:
        """Take note of what was struck out."""
        self._compact()

    def _of_source(self) -> Table:
        """Return, for each class of the source, the least that the users make of it."""
        return self._best((1 << (len(self.maps) - 1)) - 1)

    def _sum(self, users: int) -> Table:
        """Return what some users pay by target, if they all ask for it."""
        if users not in self._sums:
            first = users & -users
            least = self._least[first.bit_length()]
            self._sums[users] = self._sum(users ^ first) + least
        return self._sums[users]

    def _block(self, users: int) -> Table:
        """Return what some users pay that ask for one target, by class of the source."""
        if users not in self._blocks:
            self._blocks[users] = (self.costs + self._sum(users)).min(axis=1)
        return self._blocks[users]

    def _best(self, users: int) -> Table:
        """Return the least that some users pay, by class of the source."""
        if users not in self._bests:
            # The first user is in a block with some of the others.
            first = users & -users
            rest = users ^ first
            least = self._block(users)
            part = rest
            while part:
                part = (part - 1) & rest
                least = np.minimum(least, self._block(part | first) + self._best(rest ^ part))
            self._bests[users] = least
        return self._bests[users]

    def _of_user(self, user: int) -> Table:
        """Return, for each target of a user, the least that the others make of it."""
        others = ((1 << (len(self.maps) - 1)) - 1) ^ (1 << user)
        found: Table = np.full(self.costs.shape[1], inf)
        part = others
        while True:
            # `part` asks for the same target.
            beside = self._least[0] + self._best(others ^ part)
            found = np.minimum(found, (self.costs + beside[:, None]).min(axis=0) + self._sum(part))
            if not part:
                return found
            part = (part - 1) & others


@dataclass(frozen=True, slots=True)
class _Part:
    """A term of a variable: its number, the variable's place there, shares of what is moved."""

    term: Paid
    place: int
    share: tuple[float, float]


class GroupBound:
    """Moves costs between the terms of a step, to raise what all minima together come to.

    Args:
        step: The step; conversions may be priced too low, which makes the bound lower.
    """

    def __init__(self, step: Costed) -> None:
        unary = [np.where(table >= FORBIDDEN_S, inf, table) for table in step.unary]
        self.terms: list[Paid] = []
        for group in step.groups:
            unary[group.source] = unary[group.source] + _own(group, len(unary[group.source]))
            self.terms += _terms(group)
        #: The values that are left of each variable.
        self.kept: list[Numbers] = [np.arange(len(table)) for table in unary]
        places: list[list[tuple[Paid, int]]] = [[] for _ in unary]
        for term in self.terms:
            for place, variable in enumerate(term.variables):
                places[variable].append((term, place))
        #: What variables cost that stand with no other.
        self._alone = {v: table for v, table in enumerate(unary) if not places[v]}
        scopes = [term.variables for term in self.terms]
        sizes = [len(table) for table in unary]
        self.order = [v for v in graph_order(sizes, scopes) if places[v]]
        position = {variable: at for at, variable in enumerate(self.order)}
        self._parts = {v: _parts_of(v, places[v], position) for v in self.order}
        for v in self.order:
            for part in self._parts[v]:
                part.term.add(part.place, unary[v] / len(places[v]))

    @property
    def bound(self) -> float:
        """What no assignment costs less than."""
        alone = sum(float(table.min()) for table in self._alone.values())
        return alone + sum(term.least for term in self.terms)

    def sweep(self, deadline: float = inf) -> None:
        """Move the costs of each variable once forwards and once backwards.

        Args:
            deadline: Of `time.monotonic`, at which it ends before it is through.
        """
        for backwards in (0, 1):
            for variable in reversed(self.order) if backwards else self.order:
                parts = self._parts[variable]
                if len(parts) > 1 and len(self.kept[variable]) > 1:
                    _move(parts, backwards)
            if monotonic() > deadline:
                return

    def strike(self, above: float) -> bool:
        """Strike out values that are in no assignment which costs at most that.

        Args:
            above: What costs more is of no interest.

        Returns:
            Whether anything is left.
        """
        bound = self.bound
        if bound > above:
            return False
        left: dict[int, Numbers] = {}
        for variable in self.order:
            more = np.zeros(len(self.kept[variable]))
            for part in self._parts[variable]:
                minima = part.term.minima(part.place)
                more += minima - minima.min()
            left[variable] = np.flatnonzero(bound + more <= above)
            if not len(left[variable]):
                return False
        touched: dict[int, Paid] = {}
        for variable, places in left.items():
            if len(places) < len(self.kept[variable]):
                self.kept[variable] = self.kept[variable][places]
                for part in self._parts[variable]:
                    part.term.restrict(part.place, places)
                    touched[id(part.term)] = part.term
        for term in touched.values():
            term.settle()
        return True

    def raised(self, above: float, *, deadline: float = inf) -> float:
        """Raise the bound as far as that is worth the time, and return it.

        Args:
            above: What some assignment costs, by the prices that this knows or higher ones; there
                is no more to prove.
            deadline: Of `time.monotonic`, at which the bound so far is returned.
        """
        bound = self.bound
        while bound < above and monotonic() < deadline:
            before = bound
            for _ in range(NUM_SWEEPS):
                self.sweep(deadline)
            bound = max(bound, self.bound)
            if not self.strike(above * (1 + _ROUNDING)):
                return above
            if bound - before < LEAST_GAIN * (above - before):
                break
        return min(bound, above)


def _move(parts: Sequence[_Part], backwards: int) -> None:
    """Collect the minima of a variable from its terms, and give them to those further on."""
    minima = [part.term.minima(part.place) for part in parts]
    total = sum(minima[1:], minima[0])
    possible = np.isfinite(total)
    total = np.where(possible, total, 0.0)
    for part, least in zip(parts, minima, strict=True):
        shift = np.where(
            possible, part.share[backwards] * total - np.where(possible, least, 0.0), inf
        )
        part.term.add(part.place, shift)


def _parts_of(
    variable: int, places: Sequence[tuple[Paid, int]], position: dict[int, int]
) -> list[_Part]:
    here = position[variable]
    further = [
        [any((position[v] - here) * way > 0 for v in term.variables) for term, _ in places]
        for way in (1, -1)
    ]
    shares = [
        [one / sum(of) for one in of] if any(of) else [1 / len(of)] * len(of) for of in further
    ]
    return [
        _Part(term, place, share)
        for (term, place), share in zip(places, zip(*shares, strict=True), strict=True)
    ]


def _own(group: ConversionGroup, num_values: int) -> Table:
    """Return what each value of the source pays for what it asks for itself."""
    asked = _own_targets(group, num_values)
    paid = np.where(asked, group.costs, 0.0).sum(axis=1)
    return np.where(paid >= FORBIDDEN_S, inf, paid)


def _own_targets(group: ConversionGroup, num_values: int) -> NDArray[np.bool_]:
    asked = np.zeros((num_values, group.costs.shape[1]), dtype=bool)
    for request in group.own():
        asked[np.arange(num_values), np.broadcast_to(request.targets, (num_values,))] = True
    return asked


def _terms(group: ConversionGroup) -> Iterator[Paid]:
    """Yield the terms of what is paid for a value."""
    others = group.others()
    if not others:
        return
    costs = np.where(_own_targets(group, len(group.costs)), 0.0, group.costs)
    costs[costs >= FORBIDDEN_S] = inf
    number: dict[bytes, int] = {}
    classes = np.array([number.setdefault(row.tobytes(), len(number)) for row in costs])
    _, first = np.unique(classes, return_index=True)
    # Of a variable that asks for several targets at once, one is counted: no less is paid for all.
    users = [(variable, requests[0].targets) for variable, requests in others.items()]
    num_terms = -(-len(users) // MAX_USERS)
    for at in range(num_terms):
        together = users[at::num_terms]
        yield Paid(
            costs[first] / num_terms,
            classes,
            [targets for _, targets in together],
            (group.source, *(variable for variable, _ in together)),
        )
