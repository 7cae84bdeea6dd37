"""Choose shardings operator by operator, greedily: a start for searches on `infer.problem`."""

from __future__ import annotations

from sbp_core.infer.conversion_group import ConversionGroup, ConversionRequest
from sbp_core.infer.problem import StepProblem


def start_greedily(problem: StepProblem) -> None:
    """Let each node in turn start with the cheapest option, given the nodes before it.

    Of nodes that are alike only the first is considered.

    Args:
        problem: The problem, whose `start` is changed.
    """
    before: dict[int, list[tuple[ConversionGroup, ConversionRequest]]] = {}
    for group in problem.groups:
        for request in group.requests:
            before.setdefault(request.variable, []).append((group, request))
    known = set(problem.storage_variable.values())
    for variable in dict.fromkeys(problem.node_variable[node.name] for node in problem.work.nodes):
        # Later nodes are ignored: the search will adapt them to this one.
        cost = problem.unary[variable].copy()
        for group, request in before.get(variable, ()):
            # A value that a layer passes to the next is decided after its counterpart before.
            if group.source in known:
                cost += group.costs[problem.start[group.source], request.targets]
        problem.start[variable] = int(cost.argmin())
        known.add(variable)
