"""A first assignment of a problem, which searches begin from."""

from __future__ import annotations

from sbp_core.infer.conversion_group import ConversionGroup, ConversionRequest
from sbp_core.infer.problem import StepProblem


def start_greedily(problem: StepProblem) -> None:
    """Let each node in turn start with the option that is cheapest after those before it.

    Of nodes that are alike the first is looked at.

    Args:
        problem: Its `start` is changed.
    """
    before: dict[int, list[tuple[ConversionGroup, ConversionRequest]]] = {}
    for group in problem.groups:
        for request in group.requests:
            before.setdefault(request.variable, []).append((group, request))
    known = set(problem.storage_variable.values())
    for variable in dict.fromkeys(problem.node_variable[node.name] for node in problem.work.nodes):
        # Later nodes are not looked at: they follow this one, as minimising goes on from here.
        cost = problem.unary[variable].copy()
        for group, request in before.get(variable, ()):
            # What a layer gives to the next comes after what that does for the layer before.
            if group.source in known:
                cost += group.costs[problem.start[group.source], request.targets]
        problem.start[variable] = int(cost.argmin())
        known.add(variable)
