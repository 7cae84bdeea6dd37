"""Find the number of targets by which a mean cross-entropy divides, and make its division explicit.

A micro-batch does not know the number in the whole batch, so `whole_batch_loss` divides later.
"""

from __future__ import annotations

from sbp_aten.passes.whole_batch.rearranged import without_views
from sbp_aten.traits import TRAITS
from sbp_core.graph import Argument, LogicalGraph, TensorType
from sbp_core.passes import GraphWriter

#: Losses whose output 1 is the total weight of the targets.
_TOTAL_WEIGHTS = ("nll_loss_forward", "nll_loss2d_forward")
_BACKWARDS = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
_MEAN, _SUM = 1, 2


def divide_losses_ahead(graph: LogicalGraph) -> LogicalGraph:
    """Write the gradient of a mean cross-entropy as a division, then the gradient of a sum.

    before: dx = nll_loss_backward(g, x, y, w, mean, ignored, D)
    after:  dx = nll_loss_backward(div(g, D), x, y, w, sum, ignored, 0)     0 is not read

    With weights of classes, D is 1 if no target counts: PyTorch then computes no gradients, instead
    of 0 / 0. Without weights, D counts the targets, which `counted_targets` finds.
    """
    if not any(node.op in _BACKWARDS for node in graph.nodes):
        return graph
    writer = GraphWriter(graph)
    for node in graph.nodes:
        if node.op not in _BACKWARDS:
            writer.nodes.append(node)
            continue
        gradient, scores, targets, weight, reduction, ignored, total = node.args
        kind = graph.tensor(total.name)
        unread = writer.call(node, "aten.new_zeros.default", (scores, ()), kind)
        if reduction == _MEAN:
            if weight is not None:
                known = TensorType(graph.tensor(targets.name).shape, "bool")
                counts = writer.pointwise(node, "ne.Scalar", targets, ignored, made=known)
                count = writer.call(node, "aten.sum.default", (counts,), TensorType((), "int64"))
                flag = TensorType((), "bool")
                none = writer.pointwise(node, "eq.Scalar", count, 0, made=flag)
                total = writer.pointwise(node, "masked_fill.Scalar", total, none, 1)
            gradient, reduction = writer.pointwise(node, "div.Tensor", gradient, total), _SUM
        args = (gradient, scores, targets, weight, reduction, ignored, unread)
        writer.call(node, node.op, args, graph.tensor(node.outputs[0]))
        writer.rename_last(node)
    return writer.written()


def counted_targets(graph: LogicalGraph, value: str) -> tuple[str, Argument] | None:
    """Return the targets that a value counts, and the ignored target; None if it is no count.

    Both `nll_loss_forward(.., target, None, sum, ignored)` and `sum(ne(target, ignored))` count,
    the second only if a loss of the graph ignores the same target.
    """
    counted = _counted(graph, value)
    return next(
        (
            counted
            for node in graph.nodes
            if node.kind in _TOTAL_WEIGHTS
            and counted == (without_views(graph, node.args[1].name), node.args[4])
        ),
        None,
    )


def _counted(graph: LogicalGraph, value: str) -> tuple[str, Argument] | None:
    node = graph.producers.get(value)
    while node is not None and node.kind in TRAITS.copies:
        value = graph.tensor_inputs(node)[0]
        node = graph.producers.get(value)
    if node is None:
        return None
    if node.kind in _TOTAL_WEIGHTS:
        if value != node.outputs[1]:  # the sum of the losses
            return None
        weight, ignored = node.args[2], node.args[4]
        return None if weight is not None else (without_views(graph, node.args[1].name), ignored)
    if node.op != "aten.sum.default":
        return None
    mask, wanted = graph.producers.get(without_views(graph, node.args[0].name)), "ne"
    if mask is not None and mask.kind in ("bitwise_not", "logical_not"):
        mask, wanted = graph.producers.get(without_views(graph, mask.args[0].name)), "eq"
    if mask is None or mask.op != f"aten.{wanted}.Scalar":
        return None
    return without_views(graph, mask.args[0].name), mask.args[1]
