"""Choose the signatures of a step whose forward nodes a planner has already put on ranks.

The planners `dlplacer` and `stanza` place parts of a model, and call `infer_placed` for the rest:

    stage 0   ranks 0 1 2   convolutions       stage 1   rank 3   fully connected layers

Unlike stages of a pipeline, these may share ranks, and a value may go from any to any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sbp_core.infer.axis import decide_axis
from sbp_core.infer.pins import PinValue, resolve_pins
from sbp_core.infer.solve import strategy_of
from sbp_core.infer.stages import placed_stages
from sbp_core.infer.work import Decision, StepWork
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy

if TYPE_CHECKING:
    from sbp_core.plan_request import PlanRequest


def infer_placed(
    request: PlanRequest,
    *,
    planner: str,
    placements: tuple[Placement, ...],
    stage_of: Mapping[str, int],
    pins: Mapping[str, PinValue] | None = None,
    in_flight: tuple[int, ...] | None = None,
) -> Strategy:
    """Return a legal strategy on given stages, at least cost axis after axis (see `infer.solve`).

    Args:
        request: Graph, cluster, and the user's pins, which override `pins`; its mesh is ignored.
        planner: Name for the strategy.
        placements: Placement of each stage; all have the same mesh axes, of any sizes.
        stage_of: Stages of forward nodes, by name; the stages of other nodes follow.
        pins: The planner's own pins.
        in_flight: Quota of each stage; by default the quotas of 1F1B.

    Raises:
        ConfigError: a pin does not apply to the graph.
        PlanError: nothing satisfies the pins.
        SignatureError: an operator has no signatures.
    """
    for placement in placements:
        request.cluster.check_ranks(placement)
    work = StepWork(
        graph=request.graph,
        placements=placements,
        stages=placed_stages(request.graph, stage_of),
        cluster=request.cluster,
        bucket_bytes=None if request.options is None else request.options.bucket_bytes,
        offloaded=request.offloaded,
    )
    resolved = resolve_pins(request.graph, work.axes, pins or {}, request.pins)
    decision = Decision()
    optimal = {
        name: decide_axis(work, decision, axis, resolved) for axis, name in enumerate(work.axes)
    }
    return strategy_of(
        request,
        work,
        decision,
        planner=planner,
        in_flight=in_flight,
        report={"optimal_by_axis": optimal},
    )
