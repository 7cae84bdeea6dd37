"""Cross-entropy whose classes may be split: softmax from a maximum and a sum of parts.

The operator `_log_softmax` needs all classes of a sample; what it is made of does not:

    m = amax(x)            P(max)     one number a sample crosses between ranks
    s = sum(exp(x - m))    P(sum)     another one
    y = x - m - log s      S(1)       as the logits

The target's log-likelihood is read where its class is: `nll_loss` of split classes is a partial sum
by its own rule, and so is its backward operator, which writes -1 where the class is. The gradient
of the logits, softmax - onehot, then needs nothing from other ranks: the sum of a row of the second
term is known to all from the targets.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (its parallel cross-entropy).
"""

from __future__ import annotations

from math import prod

from sbp_aten.pass_options import ClassSplit
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, Symbol, TensorType, drop_dead
from sbp_core.passes import GraphWriter

_SOFTMAX = "aten._log_softmax.default"
_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_LOSS_BACKWARDS = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")

#: PyTorch's number for `reduction="mean"`.
_MEAN = 1

#: Dtypes that are computed with in float32.
_LOW = ("bfloat16", "float16")

#: Products whose result has the classes of a parameter.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")

#: Operators whose result lies as their first argument does.
_AS_GIVEN = ("view", "_unsafe_view", "_to_copy")

#: Most operators between such a product and the softmax.
_MOST_BETWEEN = 16


def split_classes(
    graph: LogicalGraph, how: ClassSplit | None = None, num_micro_batches: int = 1
) -> LogicalGraph:
    """Write cross-entropies so that split classes need only a maximum and a sum of parts.

    before: y = _log_softmax(x, 1); dx = _log_softmax_backward_data(nll_loss_backward(.., y, t), y)
    after:  m = amax(x, 1); c = sub(x, m); s = sum(exp(c), 1); y = sub(c, log(s))
            dx = addcmul(nll_loss_backward(.., y, t), exp(y), r, -1)   r from the targets t
    """
    how = how or ClassSplit()
    chosen = {
        node.outputs[0]: node
        for node in graph.nodes
        if node.op == _SOFTMAX and _is_wanted(graph, node, how, num_micro_batches)
    }
    if not chosen:
        return graph
    writer = GraphWriter(graph)
    for node in graph.nodes:
        if node.outputs[0] in chosen:
            _write_forward(writer, graph, node)
        elif node.op == _SOFTMAX_BACKWARD and node.args[1].name in chosen:
            _write_backward(writer, graph, node)
        else:
            writer.nodes.append(node)
    return drop_dead(graph.with_nodes(tuple(writer.nodes), types=writer.types))


def _is_wanted(graph: LogicalGraph, node: Node, how: ClassSplit, num_micro_batches: int) -> bool:
    shape = graph.tensor(node.args[0].name).shape
    if not shape:
        return False
    dim = node.args[1] % len(shape)
    at = int(len(shape) > 1)
    losses = [user for user in graph.users[node.outputs[0]] if user.op in _LOSSES]
    classes = shape[dim]
    samples = prod(shape) // max(classes, 1) // num_micro_batches
    if dim != at or not losses or classes < how.min_classes:
        return False
    return how.when == "always" or (classes > samples and _is_product(graph, node.args[0].name))


def _is_product(graph: LogicalGraph, value: str) -> bool:
    """Whether logits are a product with a matrix, but for a few operators."""
    for _ in range(_MOST_BETWEEN):
        node = graph.producers.get(value)
        if node is None or node.kind in _PRODUCTS:
            return node is not None
        tensors = graph.tensor_inputs(node)
        if not tensors:
            return False
        value = tensors[0]
    return False


def _is_contiguous(graph: LogicalGraph, value: str) -> bool:
    """Whether logits are sure to lie class by class within sample by sample."""
    node = graph.producers.get(value)
    while node is not None and (node.kind in _AS_GIVEN or "pointwise" in node.tags):
        node = graph.producers.get(graph.tensor_inputs(node)[0])
    if node is None or node.kind in ("mm", "addmm", "bmm", "baddbmm"):
        return True
    contiguous = Symbol("memory_format", "contiguous_format")
    return node.kind == "clone" and node.kwargs.get("memory_format") == contiguous


def _converted(writer: GraphWriter, node: Node, value: Argument, dtype: str) -> Argument:
    """Return a value in a dtype."""
    kind = writer.tensor(value.name)
    if kind.dtype == dtype:
        return value
    made = TensorType(kind.shape, dtype)
    kwargs = {"dtype": Symbol("dtype", dtype)}
    return writer.call(node, "aten._to_copy.default", (value,), made, kwargs=kwargs, pointwise=True)


def _write_forward(writer: GraphWriter, graph: LogicalGraph, node: Node) -> None:
    """Write `_log_softmax(x, dim, half_to_float)`, whose result is contiguous."""
    made = writer.tensor(node.outputs[0])
    given = writer.tensor(node.args[0].name)
    dtype = "float32" if given.dtype in _LOW else given.dtype
    dim = node.args[1] % len(given.shape)
    whole = TensorType(given.shape, dtype)
    row = TensorType((*given.shape[:dim], 1, *given.shape[dim + 1 :]), dtype)
    x = _converted(writer, node, node.args[0], dtype)
    if not _is_contiguous(graph, node.args[0].name):
        kept = {"memory_format": Symbol("memory_format", "contiguous_format")}
        x = writer.call(node, "aten.clone.default", (x,), whole, kwargs=kept)
    largest = writer.call(node, "aten.amax.default", (x, (dim,), True), row)
    below = writer.call(node, "aten.sub.Tensor", (x, largest), whole, pointwise=True)
    powers = writer.call(node, "aten.exp.default", (below,), whole, pointwise=True)
    total = writer.call(node, "aten.sum.dim_IntList", (powers, (dim,), True), row)
    log = writer.call(node, "aten.log.default", (total,), row, pointwise=True)
    y = writer.call(node, "aten.sub.Tensor", (below, log), whole, pointwise=True)
    _converted(writer, node, y, made.dtype)
    writer.rename_last(node)


def _write_backward(writer: GraphWriter, graph: LogicalGraph, node: Node) -> None:
    """Write `_log_softmax_backward_data(gradient, y, dim, dtype)`."""
    made = writer.tensor(node.outputs[0])
    gradient, y, dim, _ = node.args
    dim %= len(made.shape)
    dtype = "float32" if writer.tensor(y.name).dtype in _LOW else writer.tensor(y.name).dtype
    whole = TensorType(made.shape, dtype)
    row = TensorType((*made.shape[:dim], 1, *made.shape[dim + 1 :]), dtype)
    wide = _converted(writer, node, gradient, dtype)
    source = graph.producers.get(gradient.name)
    if source is not None and source.op in _LOSS_BACKWARDS:
        rows = _sum_of_rows(writer, node, source, row, dim)
    else:
        rows = writer.call(node, "aten.sum.dim_IntList", (wide, (dim,), True), row)
    wide_y = _converted(writer, node, y, dtype)
    likely = writer.call(node, "aten.exp.default", (wide_y,), whole, pointwise=True)
    args, minus = (wide, likely, rows), {"value": -1}
    logits = writer.call(node, "aten.addcmul.default", args, whole, kwargs=minus, pointwise=True)
    _converted(writer, node, logits, made.dtype)
    writer.rename_last(node)


def _sum_of_rows(writer: GraphWriter, node: Node, loss: Node, row: TensorType, dim: int) -> Ref:
    """Return what each row of the gradient of `nll_loss` sums to: -weight of the target, or 0.

    No rank needs classes of another one for it: targets and class weights are whole.
    """
    gradient, _, target, weight, reduction, ignored, total = loss.args
    dtype = row.dtype
    places = writer.tensor(target.name)
    each = TensorType(places.shape, dtype)
    scale = _converted(writer, node, gradient, dtype)
    if reduction == _MEAN:
        count = _converted(writer, node, total, dtype)
        kind = TensorType((), dtype)
        scale = writer.call(node, "aten.div.Tensor", (scale, count), kind, pointwise=True)
    minus = writer.call(
        node, "aten.neg.default", (scale,), writer.tensor(scale.name), pointwise=True
    )
    known = TensorType(places.shape, "bool")
    wanted = writer.call(node, "aten.ne.Scalar", (target, ignored), known, pointwise=True)
    if weight is not None:
        safe = writer.call(
            node, "aten.where.ScalarOther", (wanted, target, 0), places, pointwise=True
        )
        if places.dtype != "int64":
            safe = _converted(writer, node, safe, "int64")
        own = TensorType(places.shape, writer.tensor(weight.name).dtype)
        weights = writer.call(node, "aten.take.default", (weight, safe), own)
        wide = _converted(writer, node, weights, dtype)
        minus = writer.call(node, "aten.mul.Tensor", (wide, minus), each, pointwise=True)
    sums = writer.call(node, "aten.where.ScalarOther", (wanted, minus, 0.0), each, pointwise=True)
    return writer.call(node, "aten.unsqueeze.default", (sums, dim), row)
