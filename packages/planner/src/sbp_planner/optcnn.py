"""The planner `optcnn`: splits operators by exact elimination, without a memory limit.

    minimise    sum_i t_i(c_i) + sum_(i,j) x_ij(c_i, c_j)                                       [s]

c_i is the signature (the split) of operator i, or the storage of state i, on all mesh axes; t its
time, x the boxing between two. A node with two neighbours is eliminated, and replaced by a table of
minima:

    e'(a, c) = min_b [t(b) + e(a, b) + e(b, c)]

This repeats until nothing is left; then the choices are read off backwards. Graphs of today have
nodes with many neighbours, whose tables have more than two variables. Where a table would grow
beyond `max_entries`, a node is held fixed and the rest is solved exactly. Each round holds other
nodes; the first begins with the result of inference axis by axis. The report says whether any node
was held.

Complexity: nodes x signatures^(1 + width of the graph), at most nodes x `max_entries` a round.

Source: Jia, Lin, Qi, Aiken, "Exploring hidden dimensions in parallelizing convolutional neural
networks", ICML 2018, section 5 (node and edge elimination); Dechter, "Bucket elimination",
Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_core.errors import PlanError
from sbp_core.infer import FORBIDDEN_S, PINS, CostTables, joint_problem, minimise, strategy_of
from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.joint.near import limited
from sbp_planner.search_configs import OptcnnConfig


@dataclass(frozen=True, slots=True)
class OptcnnPlanner(SearchedPlanner):
    """Plans by elimination."""

    config: OptcnnConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the cheapest strategy, whatever memory it takes.

        Raises:
            ConfigError: a pin is invalid.
            PlanError: the pins cannot be satisfied.
        """
        request = context.request
        problem = joint_problem(replace(request, progress=None), pins=self.config.pins)
        is_near = limited(problem, tied=False)
        before = problem.cost(problem.start)
        if request.progress:
            request.progress("eliminating operators", 0.5)
        tables = CostTables(problem, max_entries=self.config.max_entries)
        found = minimise(
            tables.sizes, tables.factors, tables.start, max_entries=self.config.max_entries
        )
        values = found.values[: len(problem.unary)]
        seconds = problem.cost(values)
        if seconds >= FORBIDDEN_S:
            raise PlanError("no assignment fulfils the pins", where=PINS, todo="remove a pin")
        exact = found.exact and not is_near
        how = "exact" if exact else "some operators were held in each round"
        if is_near:
            how = "of the signatures that differ from these on one mesh axis"
        return strategy_of(
            request,
            problem.work,
            problem.decided(values),
            planner="optcnn",
            report={
                "cost_s": seconds,
                "cost_by_axis_s": before,
                **({"bound_s": seconds, "gap": 0.0} if exact else {}),
                "explanation": [
                    f"optcnn: {format_seconds(seconds)} a step without overlap, "
                    f"{format_seconds(before)} axis by axis; {how}"
                ],
            },
        )
