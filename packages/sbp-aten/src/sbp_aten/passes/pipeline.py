"""The pass pipeline of a training step: a fixed order of passes, each with a switch or settings.

The order, with its reasons:

    tie_step_counters   first, while step counters are as the optimizer made them
    fold_constants      then remove constants and identities
    drop_identities
    fold_views
    share_expressions   last of the cleaning passes: they make more expressions equal
    mixed_precision     on a clean graph, before any pass depends on dtypes
    place_casts         also the casts of a capture under autocast
    split_classes       on the losses as PyTorch writes them
    sum_losses
    whole_batch_loss    on ratios of sums, after expose_batch_dim, if micro-batches share one loss;
                        and on batch normalisation as one operator
    deferred_batch_norm on the same; in whole_batch_loss, if that cuts the batch
    split_batch_norm
    split_backward      before plugins, and before any operator is repeated
    extra               passes of plugins, on a graph without repetitions, at micro-batch size
    slice_operators     when all casts are placed; slices may be recomputed one by one
    expose_batch_dim    after passes that expect PyTorch's products, before repetitions
    recompute           repeats operators that must not be shared again: no cleaning after it
    defer_reductions    on the result of all these
    unalias_outputs     always: copies an output that is an input; no later pass may drop that
    accumulate          late, so that the other passes need no rates (micro-batch or step)
    accumulate_addends  on the sums over micro-batches, which exist only now
    update_rows         last: on the gradients and updates that all others have left
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_

from sbp_aten.pass_options import LossMeaning, PassOptions
from sbp_aten.passes.backward_split import split_backward
from sbp_aten.passes.batch_dim import expose_batch_dim
from sbp_aten.passes.batch_norm import split_batch_norm
from sbp_aten.passes.casts import place_casts
from sbp_aten.passes.constants import fold_constants
from sbp_aten.passes.deferred_batch_norm import defer_batch_norm, deferred_whole_batch
from sbp_aten.passes.deferred_reductions import accumulate_addends, defer_reductions
from sbp_aten.passes.losses import split_classes, sum_losses
from sbp_aten.passes.operator_slicing import slice_operators
from sbp_aten.passes.precision import mixed_precision
from sbp_aten.passes.simplify import drop_identities, fold_views, share_expressions
from sbp_aten.passes.step_counters import tie_step_counters
from sbp_aten.passes.update_rows import update_rows
from sbp_aten.passes.whole_batch.rewriting import whole_batch_loss
from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.passes import RecomputeOptions, accumulate, recompute, unalias_outputs

_LOG = logging.getLogger(__name__)


#: A pure function graph -> graph.
GraphPass = Callable[[LogicalGraph], LogicalGraph]


def chosen_passes(
    options: PassOptions,
    extra: Iterable[GraphPass] = (),
    whole_batch_of: int = 1,
    micro_batches_per_update: int = 1,
) -> Iterator[tuple[str, GraphPass]]:
    """Return name and function of each pass that is on, in order.

    Args:
        options: Switches and settings of the passes.
        extra: Further passes, such as passes of plugins, named by their functions.
        whole_batch_of: Number of micro-batches that together get the loss of the whole batch; 1
            leaves the loss of each unchanged.
        micro_batches_per_update: Number of micro-batches, each with a loss, of one update.
    """
    deferred = options.deferred_batch_norm
    cut = deferred_whole_batch if deferred else whole_batch_loss
    loss = whole_batch_of > 1
    passes: list[tuple[str, object, GraphPass]] = [
        (
            "tie_step_counters",
            options.tie_step_counters,
            partial(tie_step_counters, apart=options.counters_apart),
        ),
        ("fold_constants", options.fold_constants, fold_constants),
        ("drop_identities", options.drop_identities, drop_identities),
        ("fold_views", options.fold_views, fold_views),
        ("share_expressions", options.share_expressions, share_expressions),
        (
            "mixed_precision",
            options.mixed_precision,
            partial(mixed_precision, how=options.mixed_precision),
        ),
        ("place_casts", options.place_casts, partial(place_casts, how=options.place_casts)),
        (
            "split_classes",
            options.split_classes,
            partial(split_classes, how=options.split_classes, num_micro_batches=whole_batch_of),
        ),
        ("sum_losses", options.sum_losses, sum_losses),
        ("expose_batch_dim", options.expose_batch_dim and loss, expose_batch_dim),
        ("whole_batch_loss", loss, partial(cut, num_micro_batches=whole_batch_of)),
        (
            "deferred_batch_norm",
            deferred and not loss,
            partial(defer_batch_norm, num_micro_batches=micro_batches_per_update, cut=False),
        ),
        ("split_batch_norm", options.split_batch_norm, split_batch_norm),
        ("split_backward", options.split_backward, split_backward),
        *((_name(apply), True, apply) for apply in extra),
        ("slice_operators", options.slices, partial(slice_operators, slices=options.slices or {})),
        ("expose_batch_dim", options.expose_batch_dim, expose_batch_dim),
        (
            "recompute",
            options.recompute,
            partial(recompute, how=options.recompute or RecomputeOptions()),
        ),
        ("defer_reductions", options.defer_reductions, defer_reductions),
    ]
    return ((name, apply) for name, wanted, apply in passes if wanted)


def _name(apply: GraphPass) -> str:
    """Return the name of a pass for messages."""
    plain = apply.func if isinstance(apply, partial) else apply
    return getattr(plain, "__name__", type(plain).__name__)


def prepare_step(
    graph: LogicalGraph,
    num_micro_batches: int = 1,
    extra: Iterable[GraphPass] = (),
    *,
    options: PassOptions | None = None,
    loss: LossMeaning = LossMeaning.MEAN_OF_MICRO_BATCHES,
    micro_batches_per_update: int = 1,
) -> LogicalGraph:
    """Run the passes on a captured graph, to prepare it for planning; verify it after each pass.

    Args:
        graph: The captured graph, at micro-batch size (at batch size for `whole_batch`).
        num_micro_batches: Number of micro-batches of a step.
        extra: Further passes (plugins of kind `pass`), run before the accumulation.
        options: Switches and settings of the passes; the defaults if omitted.
        loss: Definition of the loss of several micro-batches.
        micro_batches_per_update: With `LossMeaning.EACH_MICRO_BATCH`, number of micro-batches
            before each update; divides the number of micro-batches of a step.

    Raises:
        GraphError: a pass broke the specification of graphs; or the updates do not divide; or the
            loss of the whole batch is requested, but cannot be computed from micro-batches.
    """
    options = options or PassOptions()
    parts = num_micro_batches if loss is LossMeaning.WHOLE_BATCH else 1
    several = loss is LossMeaning.EACH_MICRO_BATCH
    each = micro_batches_per_update if several else num_micro_batches
    verified: LogicalGraph | None = None
    for name, apply in chosen_passes(options, extra, parts, each):
        before = len(graph.nodes)
        graph = apply(graph)
        if verified is None or not _is_unchanged(graph, verified):
            verified = _verified(graph, name)
        _LOG.debug("pass %s: %d nodes, %+d", name, len(graph.nodes), len(graph.nodes) - before)
    graph = _verified(unalias_outputs(graph), "unalias_outputs")
    num_updates = 1
    if several:
        if micro_batches_per_update < 1 or num_micro_batches % micro_batches_per_update:
            # The last update would have fewer micro-batches.
            raise GraphError(
                f"an update of every {micro_batches_per_update} micro-batches, "
                f"and {num_micro_batches} micro-batches",
                where="trainer.micro_batches_per_update",
                accepted="a divisor of trainer.micro_batches",
            )
        num_updates = num_micro_batches // micro_batches_per_update
    graph = accumulate(graph, num_micro_batches, num_updates=num_updates)
    graph = _verified(graph, "accumulate")
    if options.accumulate_addends:
        graph = accumulate_addends(graph, options.accumulate_addends)
        graph = _verified(graph, "accumulate_addends")
    if options.update_rows is not None:
        graph = _verified(update_rows(graph, options.update_rows), "update_rows")
    return graph


def _is_unchanged(graph: LogicalGraph, verified: LogicalGraph) -> bool:
    """Whether two graphs have the same node objects, inputs, outputs and types."""
    return (
        len(graph.nodes) == len(verified.nodes)
        and all(map(is_, graph.nodes, verified.nodes))
        and graph.inputs == verified.inputs
        and graph.outputs == verified.outputs
        and graph.types == verified.types
    )


def _verified(graph: LogicalGraph, name: str) -> LogicalGraph:
    """Verify the result of a pass.

    Raises:
        GraphError: the graph is invalid; the message names the pass.
    """
    try:
        return verify_graph(graph)
    except GraphError as error:
        where = (*error.where, f"the graph that pass {name!r} made")
        raise error.replaced(GraphError, where=where) from error
