"""The search on one mesh axis, as a min-sum problem.

The variables and their costs are those of `infer.problem`. Here they become cost tables, and values
of many users get one variable more: the set of SBPs that they are boxed to.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from sbp_core.errors import PlanError
from sbp_core.infer.minsum import Factor, Table, minimise
from sbp_core.infer.pins import PINS, Pins
from sbp_core.infer.problem import FORBIDDEN_S, NO_VARIABLE, ConversionGroup, StepProblem
from sbp_core.infer.work import Decision, StepWork, replicated
from sbp_core.sbp import B

#: Values with more users than this, or with larger tables, get a variable of their targets.
_MAX_DIRECT_USERS = 3
_MAX_DIRECT_ENTRIES = 20_000

Masks = NDArray[np.int64]


def decide_axis(work: StepWork, decision: Decision, axis: int, pins: Pins) -> bool:
    """Decide one mesh axis; return whether the choice is proved to be the best on that axis.

    On an axis of one rank all SBPs are the same thing; it is written as B.

    Raises:
        PlanError: the pins leave nothing that can be boxed.
    """
    if work.has_ranks(axis):
        return _solve(work, decision, axis, pins)
    for node in work.nodes:
        part = replicated(work.calls[node.name])
        decision.nodes[node.name] = (*decision.nodes.get(node.name, ()), part)
    for entry in work.inputs:
        decision.storage[entry.name] = (*decision.storage.get(entry.name, ()), B)
    return True


def _solve(work: StepWork, decision: Decision, axis: int, pins: Pins) -> bool:
    problem = StepProblem(work, decision, range(axis, axis + 1), pins)
    problem.start_greedily()
    num_variables = len(problem.unary)
    tables = _Tables(problem)
    unary = [Factor((v,), table) for v, table in enumerate(problem.unary)]
    found = minimise(problem.sizes, [*unary, *tables.factors], problem.start)
    if found.cost >= FORBIDDEN_S:
        raise PlanError(
            f"no plan on mesh axis {work.axes[axis]!r} fulfils the pins",
            where=PINS,
            todo="remove a pin of this axis",
        )
    decided = problem.decided(found.values[:num_variables])
    decision.nodes, decision.storage = decided.nodes, decided.storage
    return found.exact


class _Tables:
    """The cost tables of conversions on one axis; adds variables to the problem."""

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem
        self.factors: list[Factor] = []
        self._of_sets: dict[int, Table] = {}
        for group in problem.groups:
            self._add_group(group)

    def _add_group(self, group: ConversionGroup) -> None:
        """Add the cost of boxing one value to what its users on one stage ask for.

        A set of targets is a bit mask; `costs[state of the source, mask]` prices all sets.
        """
        # One factor over the variable that makes the value, s, and those of its users, u and v:
        #
        #     mm (s) ---- x ---- relu (u)       table[s, u, v] = costs[s, mask(u) | mask(v)]
        #                  \---- mul (v)
        #
        #     u asks for S(0), v for B          mask 0b01 | 0b10: two conversions
        #     u and v both ask for S(0)         mask 0b01 | 0b01: one, which they share
        costs, sizes = self._set_costs(group), self.problem.sizes
        # What is asked for by the source's own variable (the storage that an input shares with a
        # state), or by none (an output): it has no dim of its own in the table.
        own: Masks = np.zeros(sizes[group.source], dtype=np.int64)
        asked: dict[int, Masks] = {}
        for request in group.requests:
            masks = 1 << request.targets
            if request.variable in (NO_VARIABLE, group.source):
                own = own | masks
            else:
                asked[request.variable] = asked.get(request.variable, 0) | masks
        entries = prod(sizes[v] for v in (group.source, *asked))
        if len(asked) > _MAX_DIRECT_USERS or entries > _MAX_DIRECT_ENTRIES:
            asked = self._through_target_variable(asked)
        # An outer "or": dim i of `together` has the states of the i-th user, its entries are sets.
        together = np.zeros((), dtype=np.int64)
        for masks in asked.values():
            together = np.bitwise_or.outer(together, masks)
        # The source's states come first, beside which `own` and `costs` are broadcast.
        states = np.arange(len(own)).reshape(-1, *(1,) * together.ndim)
        table = costs[states, own.reshape(states.shape) | together]
        self.factors.append(Factor((group.source, *asked), table))

    def _through_target_variable(self, asked: dict[int, Masks]) -> dict[int, Masks]:
        """Put one variable, the set of targets, between a value and its many users."""
        # A table over n users would have a dim for each. Instead a variable t, the set of targets
        # that are made, stands between, and n tables of two dims say which sets do for a user:
        #
        #     s -- costs[s, t] -- t -- u1, t -- u2, t -- u3 ..     forbidden where u asks beyond t
        #
        # More targets cost no less, so the best t has what is asked for, and no more.
        sets = {0}
        for masks in asked.values():
            sets = {a | int(mask) for a in sets for mask in masks}
        domain = np.array(sorted(sets), dtype=np.int64)
        # The set of the first assignment: what the users' first states ask for together.
        present = 0
        for variable, masks in asked.items():
            present |= int(masks[self.problem.start[variable]])
        between = self.problem.variable([0.0] * len(domain), int(np.searchsorted(domain, present)))
        for variable, masks in asked.items():
            missing = (masks[None, :] & ~domain[:, None]) != 0
            self.factors.append(Factor((between, variable), np.where(missing, FORBIDDEN_S, 0.0)))
        return {between: domain}

    def _set_costs(self, group: ConversionGroup) -> Table:
        """Return the cost of each set of targets (columns) from each state of the source."""
        key = id(group.costs)  # equal layers share their costs
        if key not in self._of_sets:
            # Row m has the targets of mask m, so the product sums the conversions of each set.
            num_targets = group.costs.shape[1]
            bits = np.arange(1 << num_targets)[:, None] >> np.arange(num_targets) & 1
            self._of_sets[key] = group.costs @ bits.T.astype(np.float64)
        return self._of_sets[key]
