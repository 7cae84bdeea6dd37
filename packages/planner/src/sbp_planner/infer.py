"""The planner `infer`: for any model, the fastest of a few ways to begin.

Inference decides what pins leave open, one mesh axis after the other, by estimates. Which pins it
begins with matters more than what it then finds: of transformers, whose samples stay apart through
all layers, it finds the fastest plan if all activations are pinned to the sample; where layers mix
samples (batch norms) or are small, if nothing but the batch is. So a few sets of pins are tried.
Each is inferred and compiled, and the plan whose step is predicted to be the shortest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, SbpError
from sbp_core.infer import PinValue, Pipelined, infer_strategy
from sbp_core.plugins import PlanRequest
from sbp_core.simulate import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_planner.configs import InferConfig
from sbp_planner.offloading import offloading
from sbp_planner.schedules import with_schedule


@dataclass(frozen=True, slots=True)
class InferPlanner:
    """Plans any model on any mesh."""

    config: InferConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the strategy whose compiled plan takes the least predicted time.

        Its report says under `tried` what a step takes by each set of pins, in seconds; infinity
        for one that leads to no plan. Of equal times the first counts.

        Raises:
            ConfigError: a pin or a stage pattern cannot be meant.
            SbpError: no set of pins leads to a plan; that of the first.
        """
        options = request.options or CompileOptions(cluster=request.cluster)
        made: dict[str, Strategy] = {}
        tried: dict[str, float] = {}
        problems: list[SbpError] = []
        for index, (name, pins) in enumerate(self.config.tries.items()):
            if request.progress:
                request.progress(f"trying {name!r}", index / len(self.config.tries))
            try:
                made[name] = self._infer(replace(request, progress=None), pins)
                plan = compile_plan(request.graph, made[name], options)
                tried[name] = simulate(plan).step_s
            except ConfigError:
                raise  # a pin that cannot be meant is a mistake, whatever else leads to a plan
            except SbpError as error:
                problems.append(error)
                tried[name] = inf
        best = min(tried, key=lambda name: tried[name])
        if tried[best] == inf:
            raise problems[0]
        told = ", ".join(
            f"{name} {format_seconds(time) if time < inf else 'no plan'}"
            for name, time in sorted(tried.items(), key=lambda one: one[1])
        )
        report = {"tried": tried, "explanation": [f"infer: fastest of what was tried: {told}"]}
        return replace(made[best], report={**made[best].report, **report})

    def _infer(self, request: PlanRequest, pins: Mapping[str, PinValue]) -> Strategy:
        def infer(stages: Pipelined) -> Strategy:
            inferred = infer_strategy(
                request,
                planner="infer",
                pins=pins,
                stage_patterns=self.config.stage_patterns,
                stages=stages.stages,
                in_flight=stages.in_flight,
                orders=stages.orders,
                staleness=stages.staleness,
            )
            return offloading(request, inferred, self.config.offload)

        return with_schedule(request, self.config, infer)


def build(config: InferConfig) -> InferPlanner:
    """Make the planner."""
    return InferPlanner(config)
