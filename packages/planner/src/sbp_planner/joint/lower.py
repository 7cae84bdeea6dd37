r"""Turn the planning of a step into a choice problem, which `sbp_planner.choice` solves.

A variable (the split of an operator or state) is a node. An edge joins two variables with boxing (a
conversion between layouts, such as an all-gather) between them.

A conversion that several users share cannot be a cost of pairs. It becomes a separate node, which
is *made* or not (`sbp_core.infer.CostTables`):

    s -- D[s, t] if made -- t -- forbidden if u asks for t, and it is not made -- u
                              \- the same -------------------------------------- v

D[s, t] is the cost of target t from the source's value s. If the source itself asks for t (a new
state that is stored in the layout in which it is used elsewhere), s alone pays for it. A target
that only one variable asks for needs no such node: its cost is on the edge (s, u).

If each conversion is made exactly when some variable asks for it, an assignment of the choice
problem costs `StepProblem.cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import FORBIDDEN_S, CostedVariables, CostTables
from sbp_planner.choice import ChoiceProblem
from sbp_planner.choice.problem import Floats
from sbp_planner.joint.lifetime import VariableMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """The choice problem of a step, and the relation of its nodes to those of the step.

    Args:
        choice: Its first nodes are the variables of the step, in order; then come the nodes of
            shared conversions, and copies.
        num_variables: Number of variables of the step.
        conversions: For each conversion node, the variables that may ask for it, and for each of
            these which of its values do.
        copies: The variables of the last nodes, which hold the memory of further equal layers.
    """

    choice: ChoiceProblem
    num_variables: int
    conversions: tuple[tuple[tuple[int, NDArray[np.bool_]], ...], ...]
    copies: tuple[int, ...] = ()

    def values(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the step's variables under an assignment of the nodes."""
        return tuple(int(value) for value in assignment[: self.num_variables])

    def assignment(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of all nodes, which makes exactly the needed conversions."""
        made = (
            int(any(asks[values[variable]] for variable, asks in users))
            for users in self.conversions
        )
        own = tuple(int(value) for value in values)
        return (*own, *made, *(own[variable] for variable in self.copies))


def lower_step(
    problem: CostedVariables,
    *,
    ties: Sequence[Sequence[int]] = (),
    held: VariableMemory | None = None,
) -> LoweredStep:
    """Return the choice problem of a step.

    Args:
        problem: The step.
        ties: Groups of variables that are to have the same value.
        held: The memory of the values, and the limit; None if memory does not matter.
    """
    tables = CostTables(problem, max_entries=inf, in_pairs=True)
    num_variables, num_conversions = len(problem.unary), len(tables.made)
    costs = [np.zeros(size) for size in tables.sizes]
    edges: list[tuple[int, ...]] = []
    edge_costs: list[Floats] = []
    # Equal layers have equal tables; one of them is kept.
    shared: dict[object, Floats] = {}
    for factor in tables.factors:
        table = np.where(factor.table >= FORBIDDEN_S, inf, factor.table)
        if len(factor.variables) == 1:
            costs[factor.variables[0]] += table
        elif table.any():
            edges.append(factor.variables)
            edge_costs.append(shared.setdefault((table.shape, table.tobytes()), table))
    tied = [list(tie) for tie in ties]
    tie_of = {variable: number for number, tie in enumerate(tied) for variable in tie}
    # Conversions between variables that are tied are tied, too.
    alike: dict[object, list[int]] = {}
    for node, made in tables.made.items():
        of = [tie_of.get(v) for v in (made.group.source, *(user for user, _ in made.users))]
        if None not in of:
            alike.setdefault((*of, made.target, made.group.costs.shape), []).append(node)
    usages, intervals = None, None
    copies: tuple[int, ...] = ()
    if held is not None:
        # A node holds memory once. So each further layer that a variable decides is one more node,
        # which takes the value of the variable, and costs nothing.
        copies = held.variables[num_variables:]
        for variable in copies:
            if variable not in tie_of:
                tie_of[variable] = len(tied)
                tied.append([variable])
            tied[tie_of[variable]].append(len(costs))
            costs.append(np.zeros(tables.sizes[variable]))
        nothing = np.zeros(2, dtype=np.int64)
        usages = [*held.usages[:num_variables], *[nothing] * num_conversions]
        usages += held.usages[num_variables:]
        intervals = [*held.intervals[:num_variables], *[(0, 0)] * num_conversions]
        intervals += held.intervals[num_variables:]
    choice = ChoiceProblem(
        costs=costs,
        edges=[(u, v) for u, v in edges],
        edge_costs=edge_costs,
        ties=[*tied, *(nodes for nodes in alike.values() if len(nodes) > 1)],
        usages=usages,
        intervals=intervals,
        usage_limit=None if held is None else held.limit_bytes,
        name="step",
    )
    return LoweredStep(
        choice=choice,
        num_variables=num_variables,
        conversions=tuple(made.users for made in tables.made.values()),
        copies=copies,
    )
