"""Passes: pure functions graph -> graph, and the list that every training step goes through.

Stability: provisional.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import is_

from sbp_aten.pass_options import LossMeaning, PassOptions
from sbp_aten.passes.casts import place_casts
from sbp_aten.passes.class_split import split_classes
from sbp_aten.passes.constants import fold_constants
from sbp_aten.passes.deferred_reductions import accumulate_addends, defer_reductions
from sbp_aten.passes.device import place_on_device
from sbp_aten.passes.expose_batch_dim import expose_batch_dim
from sbp_aten.passes.identities import drop_identities
from sbp_aten.passes.losses import sum_losses
from sbp_aten.passes.met_samples import samples_met
from sbp_aten.passes.mixed_precision import mixed_precision
from sbp_aten.passes.operator_slicing import slice_operators
from sbp_aten.passes.pipeline import GraphPass, chosen_passes
from sbp_aten.passes.simplify import fold_views, share_expressions
from sbp_aten.passes.split_backward import split_backward
from sbp_aten.passes.step_counters import tie_step_counters
from sbp_aten.passes.whole_batch import whole_batch_loss
from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.passes import accumulate, unalias_outputs

__all__ = [
    "GraphPass",
    "accumulate_addends",
    "defer_reductions",
    "drop_identities",
    "expose_batch_dim",
    "fold_constants",
    "fold_views",
    "mixed_precision",
    "place_casts",
    "place_on_device",
    "prepare_step",
    "samples_met",
    "share_expressions",
    "slice_operators",
    "split_backward",
    "split_classes",
    "sum_losses",
    "tie_step_counters",
    "whole_batch_loss",
]

_LOG = logging.getLogger(__name__)


def prepare_step(
    graph: LogicalGraph,
    num_micro_batches: int = 1,
    extra: Iterable[GraphPass] = (),
    *,
    options: PassOptions | None = None,
    loss: LossMeaning = LossMeaning.MEAN_OF_MICRO_BATCHES,
    micro_batches_per_update: int = 1,
) -> LogicalGraph:
    """Bring a captured graph into the form that is planned; verified after every pass.

    Args:
        graph: As captured, at micro-batch size.
        num_micro_batches: Micro-batches of one step.
        extra: Further passes (plugins of kind `pass`), run before the accumulation.
        options: Which passes run, and how; the defaults if omitted. `passes.pipeline` has their
            order.
        loss: What the loss of several micro-batches is.
        micro_batches_per_update: With `LossMeaning.EACH_MICRO_BATCH`: so many micro-batches end
            with an update. They divide the micro-batches of a step.

    Raises:
        GraphError: a pass broke the specification; or the updates do not divide; or the loss of
            the whole batch is asked for, and does not follow from those of micro-batches.
    """
    options = options or PassOptions()
    parts = num_micro_batches if loss is LossMeaning.WHOLE_BATCH else 1
    verified: LogicalGraph | None = None
    for name, apply in chosen_passes(options, extra, parts):
        before = len(graph.nodes)
        graph = apply(graph)
        if verified is None or not _is_unchanged(graph, verified):
            verified = _verified(graph, name)
        _LOG.debug("pass %s: %d nodes, %+d", name, len(graph.nodes), len(graph.nodes) - before)
    graph = _verified(unalias_outputs(graph), "unalias_outputs")
    each = loss is LossMeaning.EACH_MICRO_BATCH
    num_updates = _num_updates(num_micro_batches, micro_batches_per_update) if each else 1
    graph = accumulate(graph, num_micro_batches, num_updates=num_updates)
    graph = _verified(graph, "accumulate")
    if not options.accumulate_addends:
        return graph
    return _verified(accumulate_addends(graph, options.accumulate_addends), "accumulate_addends")


def _num_updates(num_micro_batches: int, each: int) -> int:
    """Return the number of updates of a step.

    Raises:
        GraphError: the last one would have fewer micro-batches.
    """
    if each < 1 or num_micro_batches % each:
        raise GraphError(
            f"an update of every {each} micro-batches, and {num_micro_batches} micro-batches",
            where="trainer.micro_batches_per_update",
            accepted="a divisor of trainer.micro_batches",
        )
    return num_micro_batches // each


def _is_unchanged(graph: LogicalGraph, verified: LogicalGraph) -> bool:
    """Whether a graph has the very nodes of another, and the same inputs, outputs and types."""
    return (
        len(graph.nodes) == len(verified.nodes)
        and all(map(is_, graph.nodes, verified.nodes))
        and graph.inputs == verified.inputs
        and graph.outputs == verified.outputs
        and graph.types == verified.types
    )


def _verified(graph: LogicalGraph, name: str) -> LogicalGraph:
    """Verify what a pass has made.

    Raises:
        GraphError: names the pass as well.
    """
    try:
        return verify_graph(graph)
    except GraphError as error:
        where = (*error.where, f"the graph that pass {name!r} made")
        raise error.replaced(GraphError, where=where) from error
