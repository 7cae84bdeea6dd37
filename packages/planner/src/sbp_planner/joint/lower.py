r"""From a step to a choice problem: one node a variable, one edge for each pair that box between.

A conversion that several users share is no matter of pairs. It becomes a node of its own, which is
*made* or not:

    s -- D[s, t] if made -- t -- forbidden if u asks for t, and it is not made -- u
                              \- the same -------------------------------------- v

D[s, t] is what target t costs from the source's value s, unless the source itself asks for t (a new
state that is stored as it is asked for elsewhere), which is then paid by s alone. A target that one
variable alone asks for needs no such node: it is paid on the edge (s, u).

With that, the cost of an assignment of the choice problem, with each conversion made iff somebody
asks for it, is what `StepProblem.cost` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbp_core.infer import FORBIDDEN_S, ConversionGroup, Costed, Request
from sbp_planner.choice import ChoiceProblem
from sbp_planner.choice.problem import Floats
from sbp_planner.joint.lifetime import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """The choice problem of a step, and how its nodes are those of the step.

    Args:
        choice: Its first nodes are the variables of the step, in order; behind them come those of
            shared conversions, and copies.
        conversions: For each of the latter: the variables that ask for it, and for each of them
            which of its values do.
        copies: The variables of the last nodes, which hold what other equal layers do.
    """

    choice: ChoiceProblem
    num_variables: int
    conversions: tuple[tuple[tuple[int, Floats], ...], ...]
    copies: tuple[int, ...] = ()

    def values(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the step's variables under an assignment of the nodes."""
        return tuple(int(value) for value in assignment[: self.num_variables])

    def assignment(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of all nodes: what somebody asks for is made, nothing else."""
        made = (
            int(any(asks[values[variable]] for variable, asks in users))
            for users in self.conversions
        )
        own = tuple(int(value) for value in values)
        return (*own, *made, *(own[variable] for variable in self.copies))


class _Lowering:
    """Collects nodes and edges."""

    def __init__(self, problem: Costed, ties: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.costs = [_without_forbidden(table) for table in problem.unary]
        self.edges: list[tuple[int, int]] = []
        self.edge_costs: list[Floats] = []
        self.conversions: list[tuple[tuple[int, Floats], ...]] = []
        self.ties: list[Sequence[int]] = [*ties]
        self._tie_of = {v: n for n, tie in enumerate(self.ties) for v in tie}
        self._tied_conversions: dict[object, list[int]] = {}
        self._shared: dict[object, Floats] = {}
        for group in problem.groups:
            self._add_group(group)
        self.ties += [nodes for nodes in self._tied_conversions.values() if len(nodes) > 1]

    def _add_group(self, group: ConversionGroup) -> None:
        costs, num_targets = group.costs, group.costs.shape[1]
        num_sources = len(self.problem.unary[group.source])
        # What the source asks for of itself, it pays alone.
        own = np.zeros((num_sources, num_targets), dtype=bool)
        for request in group.own():
            targets = np.broadcast_to(request.targets, (num_sources,))
            own[np.arange(num_sources), targets] = True
        self.costs[group.source] = _without_forbidden(
            self.costs[group.source] + np.where(own, costs, 0.0).sum(axis=1)
        )
        rest = np.where(own, 0.0, costs)
        asked = {
            variable: self._asked(requests, num_targets, len(self.problem.unary[variable]))
            for variable, requests in group.others().items()
        }
        users_of = sum((asks.any(axis=0) for asks in asked.values()), np.zeros(num_targets))
        shared = (users_of > 1) & rest.any(axis=0)
        for variable, asks in asked.items():
            alone = rest[:, ~shared] @ asks[:, ~shared].T
            if alone.any():
                self._add_edge(group.source, variable, alone)
        for target in np.flatnonzero(shared):
            users = tuple(
                (variable, asks[:, target])
                for variable, asks in asked.items()
                if asks[:, target].any()
            )
            self._add_conversion(group, int(target), rest[:, target], users)

    def _asked(self, requests: Sequence[Request], num_targets: int, num_values: int) -> Floats:
        """Return (values, targets), 1 where a value of a variable asks for a target."""
        found = np.zeros((num_values, num_targets))
        for request in requests:
            found[np.arange(num_values), request.targets] = 1.0
        return found

    def _add_conversion(
        self,
        group: ConversionGroup,
        target: int,
        costs: Floats,
        users: tuple[tuple[int, Floats], ...],
    ) -> None:
        node = len(self.costs)
        self.costs.append(np.zeros(2))
        self.conversions.append(users)
        self._add_edge(group.source, node, np.stack([np.zeros_like(costs), costs], axis=1))
        for variable, asks in users:
            forbidden = np.stack([np.where(asks > 0, np.inf, 0.0), np.zeros_like(asks)])
            self._add_edge(node, variable, forbidden)
        # Conversions between variables that are tied are tied, too.
        ties = tuple(self._tie_of.get(v) for v in (group.source, *(v for v, _ in users)))
        if None not in ties:
            nodes = self._tied_conversions.setdefault((ties, target, group.costs.shape), [])
            nodes.append(node)

    def _add_edge(self, u: int, v: int, costs: Floats) -> None:
        table = _without_forbidden(costs)
        self.edges.append((u, v))
        # Equal layers have equal tables, of which one is kept.
        self.edge_costs.append(self._shared.setdefault((table.shape, table.tobytes()), table))

    def add_copies(self, variables: Sequence[int]) -> None:
        """Add nodes that take the values of variables, and cost nothing."""
        copies: dict[int, list[int]] = {}
        for variable in variables:
            copies.setdefault(variable, []).append(len(self.costs))
            self.costs.append(np.zeros(len(self.problem.unary[variable])))
        for variable, nodes in copies.items():
            number = self._tie_of.get(variable)
            if number is None:
                number = self._tie_of[variable] = len(self.ties)
                self.ties.append((variable,))
            self.ties[number] = (*self.ties[number], *nodes)


def _without_forbidden(table: Floats) -> Floats:
    return np.where(table >= FORBIDDEN_S, np.inf, table)


def lower_step(
    problem: Costed, *, ties: Sequence[Sequence[int]] = (), held: Held | None = None
) -> LoweredStep:
    """Return the choice problem of a step.

    Args:
        problem: The step.
        ties: Variables that are to have the same value.
        held: What values hold while they live, and the limit; None if memory does not matter.
    """
    lowering = _Lowering(problem, ties)
    num_variables, num_conversions = len(problem.unary), len(lowering.conversions)
    usages, intervals = None, None
    repeated: tuple[int, ...] = ()
    if held is not None:
        # A node holds something once, so each further layer that a variable decides is a node more.
        repeated = held.variables[num_variables:]
        nothing = np.zeros(2, dtype=np.int64)
        usages = [*held.usages[:num_variables], *[nothing] * num_conversions]
        usages += held.usages[num_variables:]
        intervals = [*held.intervals[:num_variables], *[(0, 0)] * num_conversions]
        intervals += held.intervals[num_variables:]
        lowering.add_copies(repeated)
    choice = ChoiceProblem(
        costs=lowering.costs,
        edges=lowering.edges,
        edge_costs=lowering.edge_costs,
        ties=lowering.ties,
        usages=usages,
        intervals=intervals,
        usage_limit=None if held is None else held.limit_bytes,
        name="step",
    )
    return LoweredStep(
        choice=choice,
        num_variables=num_variables,
        conversions=tuple(lowering.conversions),
        copies=tuple(repeated),
    )
