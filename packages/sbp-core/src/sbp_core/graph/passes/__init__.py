"""Passes: pure functions graph -> graph, and the list that every training step goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sbp_core.graph.ir import LogicalGraph
from sbp_core.graph.passes.accumulate import accumulate
from sbp_core.graph.passes.clocks import tie_clocks
from sbp_core.graph.passes.losses import sum_losses
from sbp_core.graph.passes.simplify import fold_views, share_expressions
from sbp_core.graph.passes.unknown import allow_unknown
from sbp_core.graph.spec import verify_graph

__all__ = [
    "accumulate",
    "allow_unknown",
    "fold_views",
    "prepare_step",
    "share_expressions",
    "sum_losses",
    "tie_clocks",
]


def prepare_step(
    graph: LogicalGraph,
    num_micro_batches: int = 1,
    extra: Iterable[Callable[[LogicalGraph], LogicalGraph]] = (),
) -> LogicalGraph:
    """Bring a captured graph into the form that is planned; verified after every pass.

    Args:
        graph: As captured, at micro-batch size.
        num_micro_batches: Micro-batches of one step.
        extra: Further passes (plugins of kind `pass`), run before the accumulation.

    Raises:
        GraphError: a pass broke the specification.
    """
    passes = (tie_clocks, fold_views, share_expressions, sum_losses, *extra)
    for apply in passes:
        graph = verify_graph(apply(graph))
    return verify_graph(accumulate(graph, num_micro_batches))
