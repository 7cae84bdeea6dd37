"""The planner `greedy`: splits operator after operator, each in the way that is cheapest then.

    for each operator, in the order of the graph:
        choose its signature (its split) on all mesh axes to minimise
            its own time + the boxing of its arguments, as they were made or are stored         [s]

It does not look ahead, and does not take a choice back. States are stored whole unless they are
pinned, and the batch follows the pins. It is fast, and a baseline: its plans are legal, and often
far from the best.

Complexity: operators x signatures x arguments.

Source: Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021,
section 3.2 (signatures are inferred in topological order; of candidates the cheapest).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_core.errors import PlanError
from sbp_core.infer import FORBIDDEN_S, PINS, joint_problem, start_greedily, strategy_of
from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.search_configs import GreedyConfig


@dataclass(frozen=True, slots=True)
class GreedyPlanner(SearchedPlanner):
    """Plans operator after operator."""

    config: GreedyConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the strategy that the rule of the module's docstring gives.

        Raises:
            ConfigError: a pin is invalid.
            PlanError: the choices for earlier operators leave no legal choice for a later one.
        """
        request = context.request
        quiet = replace(request, progress=None)
        problem = joint_problem(quiet, pins=self.config.pins, from_axes=False)
        start_greedily(problem)
        seconds = problem.cost(problem.start)
        if seconds >= FORBIDDEN_S:
            raise PlanError(
                "choices of earlier operators cannot be boxed to what the pins ask of later ones",
                where=PINS,
                todo="choose planner=ilp, which looks ahead, or remove a pin",
            )
        return strategy_of(
            request,
            problem.work,
            problem.decided(problem.start),
            planner="greedy",
            report={
                "cost_s": seconds,
                "explanation": [
                    f"greedy: {format_seconds(seconds)} a step without overlap, each operator "
                    "with the cheapest signature, given the earlier ones"
                ],
            },
        )
