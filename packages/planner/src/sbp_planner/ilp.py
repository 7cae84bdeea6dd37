"""The planner `ilp`: all operators, states and mesh axes in one integer program, with a bound.

    minimise    sum_v t_v(s_v) + sum_c x_c(s)                                                   [s]
    such that   the compiled plan fits the memory of a rank                                     [B]
                equal layers are decided alike, unless `tied` is false

s_v is the signature of an operator, or the storage of a state, on all mesh axes at once; t its time
on the rank with the largest shard; x_c the time of conversion c, paid once for all who ask for it
(`joint.lower`). It is solved by `sbp_planner.choice`, whose page says how, and what its bound
means: no assignment costs less. Overlap is not in the objective; the time that is reported as
predicted is that of the compiled plan in simulated time. Memory over time is in the program by an
estimate (`joint.lifetime`) that is corrected by exact memory (`joint.search`).

Of the variants of the step that are left open (micro-batches, recomputation, slices), each is
solved unless its bound says that it is no faster than the best plan so far (`joint.family`).

If no plan fits, or memory costs more than a little, all of that is done again with states of the
optimizer in the memory of the host, whose copies are part of t_v (`offload_search`).

Complexity: that of integer programming, for each variant that is solved; `time_limit_s` ends it
with the best assignment so far, its bound and its gap.

Source: Zheng et al., "Alpa", OSDI 2022, section 4.2 (the program for one mesh); here with the
sharing of conversions, states and the optimizer, and exact prices.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_planner.joint.family import VariantOutcome, plan_family
from sbp_planner.joint.search import JointSettings
from sbp_planner.search_configs import IlpConfig


@dataclass(frozen=True, slots=True)
class IlpPlanner(SearchedPlanner):
    """Plans by an integer program."""

    config: IlpConfig

    chooses_variants = keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the cheapest strategy that fits.

        Raises:
            ConfigError: a pin cannot be meant.
            PlanError: nothing that was found fits; says what was.
        """
        config = self.config
        return plan_family(
            context.request,
            JointSettings(
                planner="ilp",
                time_limit_s=context.time_limit_s,
                gap=config.gap,
                tied=config.tied,
                limit_key=context.limit_key,
            ),
            limit_bytes=context.limit_bytes,
            pins=config.pins,
        )

    def gain(self, planned: Strategy) -> float:
        """Return the share of a step that a plan of any memory may take less, without overlap.

        It is what the fastest of its own variant takes less, or the bound of a variant of which
        what was found and fits is slower.
        """
        report = planned.report
        cost_s = float(report["cost_s"])
        less = [cost_s, float(report["unlimited_s"])]
        for one in report.get("variants", ()):
            if one["outcome"] in (VariantOutcome.SLOWER, VariantOutcome.NO_FIT):
                less.append(float(one["bound_s"]))
        return 1 - min(less) / cost_s if cost_s else 0.0


def build(config: IlpConfig) -> IlpPlanner:
    """Make the planner."""
    return IlpPlanner(config)
