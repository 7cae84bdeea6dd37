"""Join pipeline stages that were planned one by one into the strategy of the whole step.

`stage_search` (planners `alpa`, `galvatron`) plans each stage as a step of its own, its segment
(`segments`). The stage keeps the signatures and storages found there. Some operators are in no
segment, because they exist only where the model is cut (such as the sum of two gradients that cross
to the previous stage). Their signatures are inferred here, with all others fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp_core.infer import (
    Decision,
    FixedDecisions,
    Pins,
    Pipelined,
    StepWork,
    assign_stages,
    decide_axis,
    strategy_of,
)
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy


def assembled(
    request: PlanRequest,
    stages: Pipelined,
    patterns: Sequence[Sequence[str]],
    parts: Sequence[FixedDecisions],
    pins: Pins,
    *,
    planner: str,
    report: dict[str, Any],
) -> Strategy:
    """Return the strategy that joins the decisions for the segments.

    Args:
        request: The request to plan.
        stages: The mesh of each segment.
        patterns: Module patterns of each stage.
        parts: The decisions for each segment; legal on the mesh of its stage.
        pins: The resolved pins, on all axes of the stages.
        planner: Name of the planner, for the strategy.
        report: The report of the strategy.

    Raises:
        PlanError: no legal strategy joins the parts.
    """
    graph = request.graph
    work = StepWork(
        graph=graph,
        placements=stages.stages,
        stages=assign_stages(graph, len(stages.stages), patterns if len(patterns) > 1 else ()),
        cluster=request.cluster,
        bucket_bytes=None if request.options is None else request.options.bucket_bytes,
        offloaded=request.offloaded,
    )
    homes, owners = work.stages.nodes, work.stages.inputs
    kept = FixedDecisions(
        nodes={
            name: signature
            for stage, part in enumerate(parts)
            for name, signature in part.nodes.items()
            if homes[name] == stage
        },
        storage={
            name: sbp
            for stage, part in enumerate(parts)
            for name, sbp in part.storage.items()
            if owners[name] == stage
        },
    )
    decision = _decided(work, pins, kept)
    return strategy_of(
        request,
        work,
        decision,
        planner=planner,
        in_flight=stages.in_flight,
        orders=stages.orders,
        staleness=stages.staleness,
        report=report,
    )


def _decided(work: StepWork, pins: Pins, kept: FixedDecisions) -> Decision:
    decision = Decision()
    for axis in range(len(work.axes)):
        decide_axis(work, decision, axis, pins, kept)
    return decision
