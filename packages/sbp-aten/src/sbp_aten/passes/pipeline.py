"""Which passes a step goes through: each with its switch or its settings, in a fixed order.

The order, and why it is so:

    tie_step_counters          first, while step counters are as the optimizer made them
    fold_constants      then what is known, and what comes to nothing, goes
    drop_identities
    fold_views
    share_expressions   last of those that clean up: they make equal what is to be shared
    mixed_precision     on a clean graph, before anything reckons with dtypes
    place_casts         also the conversions of a capture under autocast
    split_classes       on the losses as PyTorch writes them
    sum_losses
    whole_batch_loss    on ratios of sums, and on batch normalisation as one operator
    split_batch_norm
    split_backward      before plugins, and before any operator is repeated
    extra               passes of plugins, on a graph without repetitions, at micro-batch size
    slice_operators     what is sliced has its conversions, and may be made again slice by slice
    expose_batch_dim        on products as all the others know them, before any is repeated
    recompute           repeats what must not be shared again: nothing cleans up after it
    defer_reductions    on what is there after all that
    unalias_outputs         always: what leaves as an input is copied, and nobody drops that again
    accumulate          the others need not know of rates
    accumulate_addends    on the sums over micro-batches, which are there only now
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes.batch_norm import split_batch_norm
from sbp_aten.passes.casts import place_casts
from sbp_aten.passes.class_split import split_classes
from sbp_aten.passes.constants import fold_constants
from sbp_aten.passes.deferred_reductions import defer_reductions
from sbp_aten.passes.expose_batch_dim import expose_batch_dim
from sbp_aten.passes.identities import drop_identities
from sbp_aten.passes.losses import sum_losses
from sbp_aten.passes.mixed_precision import mixed_precision
from sbp_aten.passes.operator_slicing import slice_operators
from sbp_aten.passes.simplify import fold_views, share_expressions
from sbp_aten.passes.split_backward import split_backward
from sbp_aten.passes.step_counters import tie_step_counters
from sbp_aten.passes.whole_batch import whole_batch_loss
from sbp_core.graph import LogicalGraph
from sbp_core.passes import recompute

#: A pure function graph -> graph.
GraphPass = Callable[[LogicalGraph], LogicalGraph]


def chosen_passes(
    options: PassOptions, extra: Iterable[GraphPass] = (), whole_batch_of: int = 1
) -> Iterator[tuple[str, GraphPass]]:
    """Yield name and function of each pass that is on, in order.

    Args:
        options: Which passes are on, and how.
        extra: Further passes, such as those of plugins; they bear their own names.
        whole_batch_of: Micro-batches whose loss is that of the whole batch; 1 leaves the loss of
            each as it is.
    """
    cleaning: dict[str, GraphPass] = {
        "tie_step_counters": partial(tie_step_counters, apart=options.counters_apart),
        "fold_constants": fold_constants,
        "drop_identities": drop_identities,
        "fold_views": fold_views,
        "share_expressions": share_expressions,
    }
    yield from ((name, cleaning[name]) for name in cleaning if getattr(options, name))
    if options.mixed_precision is not None:
        yield "mixed_precision", partial(mixed_precision, how=options.mixed_precision)
    if options.place_casts is not None:
        yield "place_casts", partial(place_casts, how=options.place_casts)
    if options.split_classes is not None:
        yield (
            "split_classes",
            partial(split_classes, how=options.split_classes, num_micro_batches=whole_batch_of),
        )
    if options.sum_losses:
        yield "sum_losses", sum_losses
    if whole_batch_of > 1:
        if options.expose_batch_dim:
            yield "expose_batch_dim", expose_batch_dim
        yield "whole_batch_loss", partial(whole_batch_loss, num_micro_batches=whole_batch_of)
    if options.split_batch_norm:
        yield "split_batch_norm", split_batch_norm
    if options.split_backward:
        yield "split_backward", split_backward
    yield from ((_name(apply), apply) for apply in extra)
    if options.slices:
        yield "slice_operators", partial(slice_operators, slices=options.slices)
    if options.expose_batch_dim:
        yield "expose_batch_dim", expose_batch_dim
    if options.recompute is not None:
        yield "recompute", partial(recompute, how=options.recompute)
    if options.defer_reductions:
        yield "defer_reductions", defer_reductions


def _name(apply: GraphPass) -> str:
    """Return what a message calls a pass."""
    plain = apply.func if isinstance(apply, partial) else apply
    return getattr(plain, "__name__", type(plain).__name__)
