r"""Write the costs of a sharding problem as tables over few variables, for `infer.minsum`.

One table over the variable s of the operator that makes a value, and u and v of its users:

    mm (s) ---- x ---- relu (u)       table[s, u, v] = sum of costs[s, t] over the distinct t
                 \---- mul (v)                         that u and v ask for

    u asks for S(0), v for B          two conversions
    u and v both ask for S(0)         one, which they share

A table over many users would have a dim for each. Instead there are variables in between, and
tables of two dims that forbid a target that a user needs and the variable in between lacks:

    few targets    one variable, the set of targets that are made:   s -- set -- u,  set -- v, ..
    many           one variable for each target, made or not:        s -- made -- u, made -- v, ..
                   in pairs, what one user alone asks for:           s -- u

More targets never cost less, so the best assignment makes the targets that are needed and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer.conversion_group import ConversionGroup, ConversionRequest, Numbers
from sbp_core.infer.minsum import Factor, Table
from sbp_core.infer.problem import FORBIDDEN_S

#: Values with more users than this get variables in between.
_MAX_DIRECT_USERS = 3

#: Most targets whose sets are all enumerated.
_MAX_SET_TARGETS = 12

Masks = NDArray[np.int64]


class CostedVariables(Protocol):
    """Variables and their costs, such as those of a `StepProblem`."""

    @property
    def unary(self) -> Sequence[Table]:
        """Seconds of each value of each variable, by itself."""
        ...

    @property
    def start(self) -> Sequence[int]:
        """A value of each variable."""
        ...

    @property
    def groups(self) -> Sequence[ConversionGroup]:
        """The conversions between them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MadeTarget:
    """The meaning of a variable between a value and its users: one target, made or not.

    Args:
        group: The conversions of the value.
        target: Number of the target.
        users: The variables that may ask for it, and which of their values do.
    """

    group: ConversionGroup
    target: int
    users: tuple[tuple[int, NDArray[np.bool_]], ...]


class CostTables:
    """The tables of a step.

    Args:
        problem: The step.
        max_entries: Values whose tables would be larger than this get variables in between.
        in_pairs: Whether each table has at most two variables, and each variable in between stands
            for a single target.
    """

    def __init__(
        self, problem: CostedVariables, *, max_entries: float, in_pairs: bool = False
    ) -> None:
        self.max_entries = max_entries
        self.max_users = 1 if in_pairs else _MAX_DIRECT_USERS
        self.max_set_targets = 0 if in_pairs else _MAX_SET_TARGETS
        self.most_alone = int(in_pairs)
        #: The variables in between that stand for single targets, with their targets.
        self.made: dict[int, MadeTarget] = {}
        #: Number of values of each variable: first the step's, then the variables in between.
        self.sizes: list[int] = list(map(len, problem.unary))
        #: A value of each.
        self.start: list[int] = list(problem.start)
        self.factors: list[Factor] = [
            Factor((variable,), table) for variable, table in enumerate(problem.unary)
        ]
        # Equal layers share their costs and targets, so results are computed once.
        self._found: dict[object, Table] = {}
        for group in problem.groups:
            self._add(group)

    def _add(self, group: ConversionGroup) -> None:
        others = group.requests_by_variable()
        entries = prod(self.sizes[v] for v in (group.source, *others))
        if len(others) <= self.max_users and entries <= self.max_entries:
            self.factors.append(Factor((group.source, *others), self._direct(group, others)))
        elif group.costs.shape[1] <= self.max_set_targets:
            self._add_set(group, others)
        else:
            self._add_made(group)

    def _direct(self, group: ConversionGroup, others: dict[int, list[ConversionRequest]]) -> Table:
        """Return the table over the source and its users."""
        asked = [
            (place, request.targets)
            for place, requests in enumerate((group.own(), *others.values()))
            for request in requests
        ]
        key = (id(group.costs), *((place, id(targets)) for place, targets in asked))
        if key not in self._found:
            num_dims = 1 + len(others)

            def along(targets: Numbers, place: int) -> Numbers:
                shape = [1] * num_dims
                shape[place] = -1
                return targets.reshape(shape)

            states = along(np.arange(len(group.costs)), 0)
            total = np.zeros([1] * num_dims)
            before: list[Numbers] = []
            for place, targets in asked:
                wanted = along(targets, place)
                # A target that is already asked for is not made twice.
                is_new = np.ones([1] * num_dims, dtype=bool)
                for other in before:
                    is_new = is_new & (other != wanted)
                total = total + np.where(is_new, group.costs[states, wanted], 0.0)
                before.append(wanted)
            sizes = [self.sizes[v] for v in (group.source, *others)]
            self._found[key] = np.ascontiguousarray(np.broadcast_to(total, sizes))
        return self._found[key]

    def _variable(self, size: int, start: int) -> int:
        self.sizes.append(size)
        self.start.append(start)
        return len(self.sizes) - 1

    def _add_set(self, group: ConversionGroup, others: dict[int, list[ConversionRequest]]) -> None:
        """Put one variable, the set of targets, between a value and its users."""
        masks: dict[int, Masks] = {}
        for variable, requests in others.items():
            for request in requests:
                masks[variable] = masks.get(variable, 0) | (1 << request.targets)
        sets = {0}
        for of in masks.values():
            sets = {a | int(mask) for a in sets for mask in of}
        domain = np.array(sorted(sets), dtype=np.int64)
        # The first assignment: the set of targets that the users' start values ask for.
        present = 0
        for variable, of in masks.items():
            present |= int(of[self.start[variable]])
        between = self._variable(len(domain), int(np.searchsorted(domain, present)))
        for variable, of in masks.items():
            missing = (of[None, :] & ~domain[:, None]) != 0
            self.factors.append(Factor((between, variable), np.where(missing, FORBIDDEN_S, 0.0)))
        own: Masks = np.zeros(len(group.costs), dtype=np.int64)
        for request in group.own():
            own = own | (1 << request.targets)
        num_targets = group.costs.shape[1]
        made = own[:, None] | domain[None, :]
        table = np.zeros(made.shape)
        for target in range(num_targets):
            table += np.where(made >> target & 1, group.costs[:, target, None], 0.0)
        self.factors.append(Factor((group.source, between), table))

    def _add_made(self, group: ConversionGroup) -> None:
        """Put a variable for each target, made or not, between a value and its users."""
        own, asked = group.own_targets(), group.targets_by_variable()
        if own.any():
            paid = np.where(own, group.costs, 0.0).sum(axis=1)
            self.factors.append(Factor((group.source,), paid))
        costs = np.where(own, 0.0, group.costs)
        num_states = len(costs)
        num_users = sum((asks.any(axis=0) for asks in asked.values()), np.zeros(costs.shape[1]))
        between = (num_users > self.most_alone) & costs.any(axis=0)
        for variable, asks in asked.items():
            alone = costs[:, ~between] @ asks[:, ~between].T
            if alone.any():
                self.factors.append(Factor((group.source, variable), alone))
        for target in np.flatnonzero(between).tolist():
            users = [(v, asks[:, target]) for v, asks in asked.items() if asks[:, target].any()]
            present = any(asks[self.start[variable]] for variable, asks in users)
            made = self._variable(2, int(present))
            self.made[made] = MadeTarget(group=group, target=target, users=tuple(users))
            table = np.stack([np.zeros(num_states), costs[:, target]], axis=1)
            self.factors.append(Factor((group.source, made), table))
            for variable, asks in users:
                table = np.stack([np.where(asks, FORBIDDEN_S, 0.0), np.zeros(len(asks))])
                self.factors.append(Factor((made, variable), table))
