"""A first assignment of a problem, which searches begin from."""

from __future__ import annotations

from sbp_core.infer.conversion_group import ConversionGroup, Request
from sbp_core.infer.problem import StepProblem


def start_greedily(problem: StepProblem) -> None:
    """Let each node in turn start with the option that is cheapest after those before it.

    Args:
        problem: Its `start` is changed.
    """
    before: dict[int, list[tuple[ConversionGroup, Request]]] = {}
    for group in problem.groups:
        for request in group.requests:
            before.setdefault(request.variable, []).append((group, request))
    for node in problem.work.nodes:
        variable = problem.node_variable[node.name]
        # Later nodes are not looked at: they follow this one, as minimising goes on from here.
        cost = problem.unary[variable].copy()
        for group, request in before.get(variable, ()):
            if group.source != variable:
                cost += group.costs[problem.start[group.source], request.targets]
        problem.start[variable] = int(cost.argmin())
