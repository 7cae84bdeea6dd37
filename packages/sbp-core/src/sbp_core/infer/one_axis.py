"""A strategy with one mesh axis decided anew, the others as they are.

    before    mm: (S(0), B) (B, S(1)) -> (S(0), S(1))     weight: (B, S(1))
    pin       weight: {data: S(0)}
    after     mm: (S(0), B) (B, S(1)) -> (S(0), S(1))     weight: (S(0), S(1))

For planners that decide something on one axis, inside of what another has decided: sharded states
inside a tensor-parallel group, or inside the stages of a pipeline.
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

    On the other axes every decision stays, unless no signature has it with the new decisions.

    Args:
        request: Graph, cluster, and pins of the user; its mesh does not count.
        strategy: A legal one for the graph, of any planner.
        axis: Name of the mesh axis.
        pins: What is asked for besides the user's pins, which override them. On other axes they may
            only say what the strategy does.

    Returns:
        The strategy, with the same stages and an empty report.

    Raises:
        ConfigError: a pin cannot be meant.
        PlanError: nothing fulfils the pins.
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
