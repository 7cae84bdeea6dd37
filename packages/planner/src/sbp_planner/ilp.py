"""The planner `ilp`: splits all operators and states by one integer program, with a bound.

    minimise    sum_v t_v(s_v) + sum_c x_c(s)                                                   [s]
    such that   the compiled plan fits the memory of a rank                                     [B]
                equal layers are decided alike, unless `tied` is false

s_v is the signature (the split) of an operator, or the storage of a state, on all mesh axes at
once; t its time on the rank with the largest shard; x_c the time of conversion c, which all its
users share (`joint.lower`). `sbp_planner.choice` solves the program. Its bound means that no
assignment costs less. Overlap is not in the objective, but the predicted time that is reported is
the simulated time of the compiled plan. Memory over time is in the program as an estimate
(`joint.lifetime`), which is corrected by the exact memory of compiled plans (`joint.search`).

If variants of the step are left open (micro-batches, recomputation, slices), each is solved unless
its bound proves that it is no faster than the best plan so far (`joint.family`).

If no plan fits, or memory costs more than a little, all of this is repeated with optimizer states
in host memory, whose copies are part of t_v (`offload_search`).

Complexity: integer programming for each variant that is solved. `time_limit_s` ends it with the
best assignment so far, its bound and its gap.

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
            ConfigError: a pin is invalid.
            PlanError: nothing that was found fits; names what was found.
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
        """Return the share of the step's time that unlimited memory might save, without overlap.

        The time it compares with is that of the fastest plan of the same variant, or the bound of
        a variant that is slower or does not fit.
        """
        report = planned.report
        cost_s = float(report["cost_s"])
        less = [cost_s, float(report["unlimited_s"])]
        for one in report.get("variants", ()):
            if one["outcome"] in (VariantOutcome.SLOWER, VariantOutcome.NO_FIT):
                less.append(float(one["bound_s"]))
        return 1 - min(less) / cost_s if cost_s else 0.0
