"""Rewrite cross-entropies so that their samples and classes may be split.

`sum_losses` writes a mean loss as a sum over a count, so that a split batch gives a partial sum.

`split_classes` replaces the operator `_log_softmax`, which needs all classes of a sample, by its
parts, which do not:

    m = amax(x)            P(max)     one number a sample is sent between ranks
    s = sum(exp(x - m))    P(sum)     another one
    y = x - m - log s      S(1)       as the logits

The target's log-likelihood is read on the rank that has its class: `nll_loss` of split classes is a
partial sum by its sharding rule. So is its backward operator, which writes -1 at the class. The
gradient of the logits, softmax - onehot, then needs nothing from other ranks: each rank knows the
row sums of the second term from the targets.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (its parallel cross-entropy).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sbp_aten.pass_options import ClassSplit
from sbp_core.graph import LogicalGraph, Node, Ref, Symbol, TensorType, drop_dead
from sbp_core.passes import GraphWriter

_SOFTMAX = "aten._log_softmax.default"
_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_LOSS_BACKWARDS = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")

#: PyTorch's numbers for `reduction=`.
_MEAN, _SUM = 1, 2

#: Products that map features to classes by a parameter.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")

#: Operators whose result has the memory layout of their first argument.
_AS_GIVEN = ("view", "_unsafe_view", "_to_copy")

#: Largest number of operators between such a product and the softmax.
_MOST_BETWEEN = 16


def computed_in(dtype: str) -> str:
    """Return the dtype in which numbers of a dtype are summed: no narrower than float32."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def sum_losses(graph: LogicalGraph) -> LogicalGraph:
    """Write a mean negative log-likelihood as a sum, divided by its total weight.

    The backward node already takes the total weight as an argument and is unchanged.

    before: loss, count = nll_loss_forward(logp, y, w, mean, ignore)
    after:  total, count = nll_loss_forward(logp, y, w, sum, ignore); loss = div(total, count)
    """
    nodes: list[Node] = []
    types = dict(graph.types)
    for node in graph.nodes:
        if node.op not in _LOSSES or node.args[3] != _MEAN:
            nodes.append(node)
            continue
        loss, count = node.outputs
        total = f"{node.name}.sum"
        types[total] = types[loss]
        args = (*node.args[:3], _SUM, *node.args[4:])
        nodes.append(replace(node, args=args, outputs=(total, count)))
        nodes.append(
            replace(
                node,
                name=f"{node.name}.div",
                op="aten.div.Tensor",
                args=(Ref(total), Ref(count)),
                kwargs={},
                outputs=(loss,),
                tags=("pointwise",),
            )
        )
    return graph.with_nodes(tuple(nodes), types=types)


def split_classes(
    graph: LogicalGraph, how: ClassSplit | None = None, num_micro_batches: int = 1
) -> LogicalGraph:
    """Write cross-entropies so that split classes need only a partial maximum and a partial sum.

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
    return drop_dead(writer.written())


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
    """Whether logits are a product with a matrix, up to a few operators."""
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
    """Whether logits are known to be contiguous: classes within samples."""
    node = graph.producers.get(value)
    while node is not None and (node.kind in _AS_GIVEN or "pointwise" in node.tags):
        node = graph.producers.get(graph.tensor_inputs(node)[0])
    if node is None or node.kind in ("mm", "addmm", "bmm", "baddbmm"):
        return True
    contiguous = Symbol("memory_format", "contiguous_format")
    return node.kind == "clone" and node.kwargs.get("memory_format") == contiguous


def _row(kind: TensorType, dim: int, dtype: str) -> TensorType:
    """Return the type of one number a sample."""
    return TensorType((*kind.shape[:dim], 1, *kind.shape[dim + 1 :]), dtype)


def _write_forward(writer: GraphWriter, graph: LogicalGraph, node: Node) -> None:
    """Write `_log_softmax(x, dim, half_to_float)`, whose result is contiguous."""
    given = writer.tensor(node.args[0].name)
    dtype = computed_in(given.dtype)
    dim = node.args[1] % len(given.shape)
    row = _row(given, dim, dtype)
    x = writer.converted(node, node.args[0], dtype)
    if not _is_contiguous(graph, node.args[0].name):
        kept = {"memory_format": Symbol("memory_format", "contiguous_format")}
        x = writer.call(node, "aten.clone.default", (x,), writer.tensor(x.name), kwargs=kept)
    largest = writer.call(node, "aten.amax.default", (x, (dim,), True), row)
    below = writer.pointwise(node, "sub.Tensor", x, largest)
    powers = writer.pointwise(node, "exp.default", below)
    total = writer.call(node, "aten.sum.dim_IntList", (powers, (dim,), True), row)
    y = writer.pointwise(node, "sub.Tensor", below, writer.pointwise(node, "log.default", total))
    writer.converted(node, y, writer.tensor(node.outputs[0]).dtype)
    writer.rename_last(node)


def _write_backward(writer: GraphWriter, graph: LogicalGraph, node: Node) -> None:
    """Write `_log_softmax_backward_data(gradient, y, dim, dtype)`."""
    made = writer.tensor(node.outputs[0])
    gradient, y, dim, _ = node.args
    dim %= len(made.shape)
    dtype = computed_in(writer.tensor(y.name).dtype)
    row = _row(made, dim, dtype)
    wide = writer.converted(node, gradient, dtype)
    source = graph.producers.get(gradient.name)
    if source is not None and source.op in _LOSS_BACKWARDS:
        rows = _sum_of_rows(writer, node, source, row, dim)
    else:
        rows = writer.call(node, "aten.sum.dim_IntList", (wide, (dim,), True), row)
    likely = writer.pointwise(node, "exp.default", writer.converted(node, y, dtype))
    logits = writer.pointwise(node, "addcmul.default", wide, likely, rows, value=-1)
    writer.converted(node, logits, made.dtype)
    writer.rename_last(node)


def _sum_of_rows(writer: GraphWriter, node: Node, loss: Node, row: TensorType, dim: int) -> Ref:
    """Return the sum of each row of the gradient of `nll_loss`: -weight of the target, or 0.

    No rank needs classes of another rank for it: targets and class weights are whole.
    """
    gradient, _, target, weight, reduction, ignored, total = loss.args
    places = writer.tensor(target.name)
    each = TensorType(places.shape, row.dtype)
    scale = writer.converted(node, gradient, row.dtype)
    if reduction == _MEAN:
        count = writer.converted(node, total, row.dtype)
        number = TensorType((), row.dtype)
        scale = writer.pointwise(node, "div.Tensor", scale, count, made=number)
    minus = writer.pointwise(node, "neg.default", scale)
    known = TensorType(places.shape, "bool")
    wanted = writer.pointwise(node, "ne.Scalar", target, ignored, made=known)
    if weight is not None:
        safe = writer.pointwise(node, "where.ScalarOther", wanted, target, 0, made=places)
        safe = writer.converted(node, safe, "int64")
        own = TensorType(places.shape, writer.tensor(weight.name).dtype)
        weights = writer.call(node, "aten.take.default", (weight, safe), own)
        wide = writer.converted(node, weights, row.dtype)
        minus = writer.pointwise(node, "mul.Tensor", wide, minus, made=each)
    sums = writer.pointwise(node, "where.ScalarOther", wanted, minus, 0.0, made=each)
    return writer.call(node, "aten.unsqueeze.default", (sums, dim), row)
