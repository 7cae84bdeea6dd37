"""Replace the shardings of a strategy, but not its stages; for `nearby` and `one_axis`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sbp_core.infer.stages import StageMap
from sbp_core.infer.work import Decision, StepWork
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Assignment, Strategy

if TYPE_CHECKING:
    from sbp_core.plan_request import PlanRequest


def work_of(request: PlanRequest, strategy: Strategy) -> StepWork:
    """Return the step of a request on the stages of a strategy."""
    return StepWork(
        graph=request.graph,
        placements=strategy.stages,
        stages=StageMap(
            nodes={name: found.stage for name, found in strategy.nodes.items()},
            inputs={name: found.stage for name, found in strategy.storage.items()},
        ),
        cluster=request.cluster,
        bucket_bytes=None if request.options is None else request.options.bucket_bytes,
        offloaded=frozenset(name for name, found in strategy.storage.items() if found.offloaded),
    )


def with_decision(strategy: Strategy, decision: Decision) -> Strategy:
    """Return a strategy with other decisions for all nodes and inputs, and an empty report."""
    return replace(
        strategy,
        report={},
        nodes={
            name: Assignment(stage=found.stage, signature=decision.signature(name))
            for name, found in strategy.nodes.items()
        },
        storage={
            name: replace(found, sbp=NdSbp(*decision.storage[name]))
            for name, found in strategy.storage.items()
        },
    )
