"""Decide the shardings of a strategy on one mesh axis again, and leave the other axes unchanged.

    before    mm: (S(0), B) (B, S(1)) -> (S(0), S(1))     weight: (B, S(1))
    pin       weight: {data: S(0)}
    after     mm: (S(0), B) (B, S(1)) -> (S(0), S(1))     weight: (S(0), S(1))

For planners that decide one axis of a mesh whose other axes another planner has decided: sharded
states inside a tensor-parallel group, or inside the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sbp_core.infer.axis import decide_axis
from sbp_core.infer.pins import PinValue, resolve_pins
from sbp_core.infer.revision import with_decision, work_of
from sbp_core.infer.solve import check_legal
from sbp_core.infer.work import Decision, FixedDecisions
from sbp_core.strategy import Strategy

if TYPE_CHECKING:
    from sbp_core.plan_request import PlanRequest


def infer_axis(
    request: PlanRequest,
    strategy: Strategy,
    *,
    axis: str,
    pins: Mapping[str, PinValue] | None = None,
) -> Strategy:
    """Return a strategy whose entries of one mesh axis are inferred under other pins.

    All decisions on the other axes stay, unless no signature combines them with the new entries.

    Args:
        request: Graph, cluster, and pins of the user; its mesh is ignored.
        strategy: A legal strategy for the graph, of any planner.
        axis: Name of the mesh axis.
        pins: Further pins, which the user's pins override. On other axes they may only repeat
            decisions of the strategy.

    Returns:
        The strategy, with the same stages and an empty report.

    Raises:
        ConfigError: a pin does not apply to the graph.
        PlanError: nothing satisfies the pins.
        SignatureError: the signatures of an operator do not go together.
    """
    graph = request.graph
    work = work_of(request, strategy)
    resolved = resolve_pins(graph, work.axes, pins or {}, request.pins)
    kept = FixedDecisions(
        nodes={name: found.signature for name, found in strategy.nodes.items()},
        storage={name: found.sbp for name, found in strategy.storage.items()},
    )
    decision = Decision()
    for at, name in enumerate(work.axes):
        decide_axis(work, decision, at, resolved, None if name == axis else kept)
    check_legal(work, decision)
    return with_decision(strategy, decision)
