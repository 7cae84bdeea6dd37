"""Bound the time of a training step from below, if its operators can be split in very many ways.

`joint.near` uses this. A signature is one way to split an operator; x_v is that of operator v.

    cost(x) = sum_v unary_v(x_v) + sum over values of (what is paid for distinct targets, each once)

It is the bound by moved costs (`choice.moved_costs`); only the terms differ. The cost for one value
depends on *a*, the layout in which its source makes it, and on the target t_i that each user i asks
for:

    pay(a, t_1 .. t_k) = sum over the distinct t of C[a, t]

A table over all of these would be far too large for three mesh axes (hundreds of a and t), and none
is needed. Let g_i(t) be the potential of user i: its other costs. Users that share a target form a
block B, and any partition of the users into blocks is an assignment, so

    F_B(a)  = min over t of  C[a, t] + sum over i in B of g_i(t)
    min_a   = min over the partitions of the users of  sum over their blocks of F_B(a)

This is exact: two blocks that happen to have the same target only cost more than their union does.
The partitions are enumerated as subsets, so a value with k users takes 2^k passes over C. Users
beyond `MAX_USERS` are put in separate terms, each of which pays its share of C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, ConversionGroup, CostedVariables, Factor
from sbp_planner.choice.moved_costs import CostTerm, MovedCosts, TableTerm

Table = NDArray[np.float64]
Numbers = NDArray[np.int64]

#: How many users of one value share a term.
MAX_USERS = 6

#: Sweeps between two attempts to strike values out, and the share of what remains to be proved
#: that they must gain.
NUM_SWEEPS, LEAST_GAIN = 2, 0.05

#: Sums in another order differ by less than this relative amount.
_ROUNDING = 1e-9


class BoundTerm:
    """The cost of the conversions of one value, plus other costs of its variables: one bound term.

    Args:
        costs: C, (classes of the source, targets); `inf` forbids.
        classes: The class of each value of the source variable.
        users: For each user, the target of each of its values.
        variables: The source, then the users.
    """

    def __init__(
        self, costs: Table, classes: Numbers, users: Sequence[Numbers], variables: tuple[int, ...]
    ) -> None:
        self.costs, self.variables = costs, variables
        self.maps = [classes, *users]
        #: The set of all users, one bit each.
        self.users = (1 << len(users)) - 1
        self.potentials = [np.zeros(len(of)) for of in self.maps]
        self._compact()

    def _compact(self) -> None:
        """Leave out targets that no user asks for and classes that no source value has."""
        rows, self.maps[0] = np.unique(self.maps[0], return_inverse=True)
        asked = np.unique(np.concatenate(self.maps[1:]))
        number = np.zeros(self.costs.shape[1], dtype=np.int64)
        number[asked] = np.arange(len(asked))
        self.maps[1:] = [number[of] for of in self.maps[1:]]
        self.costs = self.costs[np.ix_(rows, asked)]
        #: The least of the potentials, by class of the source, then by target of each user.
        self._least = [self._reduced(place) for place in range(len(self.maps))]
        #: By set of users, what they pay: by target if all ask for it; by class of the source if
        #: all ask for one best target; by class if they ask for any targets.
        self._sums: dict[int, Table] = {0: np.zeros(len(asked))}
        self._blocks: dict[int, Table] = {}
        self._bests: dict[int, Table] = {0: np.zeros(len(rows))}

    def _reduced(self, place: int) -> Table:
        least = np.full(self.costs.shape[min(place, 1)], inf)
        np.minimum.at(least, self.maps[place], self.potentials[place])
        return least

    def add(self, place: int, shift: Table) -> None:
        """Add to the potential of a variable."""
        self.potentials[place] = self.potentials[place] + shift
        self._least[place] = self._reduced(place)
        if place:
            user = 1 << (place - 1)
            for known in (self._sums, self._blocks, self._bests):
                for users in [users for users in known if users & user]:
                    del known[users]

    def minima(self, place: int) -> Table:
        """Return the least of the term for each value of a variable."""
        least = self._of_user(place - 1) if place else self._best(self.users)
        found: Table = least[self.maps[place]] + self.potentials[place]
        return found

    @property
    def least(self) -> float:
        """The least of the term."""
        return float((self._best(self.users) + self._least[0]).min())

    def restrict(self, kept: Mapping[int, Numbers]) -> None:
        """Strike out all but the given values of some variables, by their places."""
        for place, values in kept.items():
            self.maps[place] = self.maps[place][values]
            self.potentials[place] = self.potentials[place][values]
        self._compact()

    def _sum(self, users: int) -> Table:
        """Return what some users pay, by target, if they all ask for that target."""
        if users not in self._sums:
            first = users & -users
            least = self._least[first.bit_length()]
            self._sums[users] = self._sum(users ^ first) + least
        return self._sums[users]

    def _block(self, users: int) -> Table:
        """Return what some users pay if all ask for one best target, by class of the source."""
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
        """Return, for each target of a user, the least cost of all other users with it."""
        others = self.users ^ (1 << user)
        found: Table = np.full(self.costs.shape[1], inf)
        part = others
        while True:
            # `part` asks for the same target.
            beside = self._least[0] + self._best(others ^ part)
            found = np.minimum(found, (self.costs + beside[:, None]).min(axis=0) + self._sum(part))
            if not part:
                return found
            part = (part - 1) & others


class GroupBound(MovedCosts):
    """The terms of a step, between which costs move.

    Args:
        step: The step; conversions may be priced too low, which only lowers the bound.
    """

    def __init__(self, step: CostedVariables) -> None:
        unary = [np.where(table >= FORBIDDEN_S, inf, table) for table in step.unary]
        terms: list[CostTerm] = []
        for group in step.groups:
            # The source pays alone for what it asks for itself.
            own = group.own_targets()
            paid = np.where(own, group.costs, 0.0).sum(axis=1)
            unary[group.source] = unary[group.source] + np.where(paid >= FORBIDDEN_S, inf, paid)
            terms += _terms(group, np.where(own, 0.0, group.costs))
        count = Counter(v for term in terms for v in term.variables)
        for term in terms:
            for place, v in enumerate(term.variables):
                term.add(place, unary[v] / count[v])
        alone = [Factor((v,), table) for v, table in enumerate(unary) if not count[v]]
        terms += map(TableTerm, alone)
        super().__init__(list(map(len, unary)), terms)

    def raised(self, above: float, *, deadline: float = inf) -> float:
        """Raise the bound as far as is worth the time, and return it.

        Args:
            above: The cost of some assignment, at these or higher prices; nothing above it needs
                a proof.
            deadline: Time of `time.monotonic` at which the bound so far is returned, in s.
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


def _terms(group: ConversionGroup, costs: Table) -> Iterator[BoundTerm]:
    """Yield the terms of the costs that the users of a value pay, without its source.

    Args:
        group: The value and its users.
        costs: Its costs; forbidden entries are set to `inf` here.
    """
    others = group.requests_by_variable()
    if not others:
        return
    costs[costs >= FORBIDDEN_S] = inf
    number: dict[bytes, int] = {}
    classes = np.array([number.setdefault(row.tobytes(), len(number)) for row in costs])
    _, first = np.unique(classes, return_index=True)
    # A variable that asks for several targets at once counts for one: all of them cost no less.
    users = [(variable, requests[0].targets) for variable, requests in others.items()]
    num_terms = -(-len(users) // MAX_USERS)
    for at in range(num_terms):
        together = users[at::num_terms]
        yield BoundTerm(
            costs[first] / num_terms,
            classes,
            [targets for _, targets in together],
            (group.source, *(variable for variable, _ in together)),
        )
