"""Rewrite matrix products over flattened rows so that the batch remains a separate dim.

PyTorch writes a layer over (times, batch, features) as a matrix product over rows (times * batch).
Sequences with the batch as second dim are common: `nn.MultiheadAttention` and the recurrent layers
compute so inside, also with `batch_first`. A split batch is not a contiguous part of such rows, so
every rank would have to gather all of them:

    rows (t b), T = 3, B = 4, batch split over 2 ranks:    t0    t1    t2
                                                         0011  0011  0011    rank of each row

A product over separate dims computes the same numbers, and the batch can be split:

    x (t b) i, w i o -> (t b) o        mm        rows whole
    x t b i,   w i o -> t b o          matmul    S(1), as the batch is split
    g t b o,   x t b i -> o i          tensordot: the gradient of the weight, partial sums

A product whose rows have no known batch (`batch_factors`) is unchanged.

Batched products over merged batch dims are rewritten, too. PyTorch writes `q @ k.mT` over (batch,
heads, times, features) as a batch of matrix products, one for each pair of batch and head. Split
heads are not a contiguous part of such pairs, so every rank would have to gather all of them. A
product over separate leading dims lets both dims be split:

    q (b h) t k, k (b h) k s -> (b h) t s      bmm      only the batch can be split
    q b h t k,   k b h k s   -> b h t s        matmul   so can heads

The kernel stays the same: on each rank, `matmul` merges the dims of the shard again.
"""

from __future__ import annotations

from typing import NamedTuple

from sbp_aten.passes.batch_factors import RESHAPES, BatchFactor, find_batch_factors
from sbp_aten.passes.simplify import fold_views
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, drop_dead
from sbp_core.passes import GraphWriter

_T = "aten.t.default"
_MM = "aten.mm.default"
_ADDMM = "aten.addmm.default"
_SUM = "aten.sum.dim_IntList"
_TRANSPOSE = "aten.transpose.int"
_BMM = "aten.bmm.default"


def expose_batch_dim(graph: LogicalGraph) -> LogicalGraph:
    """Rewrite products over flattened rows so that the batch is a separate dim.

    before: a = view(x, [t * b, i]); y = mm(a, w); z = view(y, [t, b, o])
    after:  z = matmul(x, w)                          x is [t, b, i]
    """
    graph = separate_merged_batches(graph)
    flattens = any(node.op in RESHAPES and len(node.args[1]) == 2 for node in graph.nodes)
    factors = find_batch_factors(graph) if flattens else {}
    if not any(factor.is_strided for factor in factors.values()):
        return graph
    writer = _ProductRewriter(graph, factors)
    for node in graph.nodes:
        if not writer.rewrite(node):
            writer.out.nodes.append(node)
    return fold_views(drop_dead(writer.out.written()))


class _ProductRewriter:
    """Rewrites the products of one graph.

    Args:
        graph: The graph to rewrite.
        factors: The batch factor of each value, where it is known.
    """

    def __init__(self, graph: LogicalGraph, factors: dict[str, BatchFactor]) -> None:
        self.graph, self.factors = graph, factors
        self.out = GraphWriter(graph)

    def rewrite(self, node: Node) -> bool:
        """Rewrite a product or a sum over flattened rows; return whether the node was one."""
        if node.op in (_MM, _ADDMM):
            *bias, left, right = node.args
            if self._flattened_batch(left) is not None:
                return self._rewrite_product(node, bias, left, right)
            return not bias and self._rewrite_contraction(node, left, right)
        return node.op == _SUM and self._rewrite_sum(node)

    def _flattened_batch(self, value: Argument) -> BatchFactor | None:
        """Return the batch factor of a matrix's rows; None if they contain no batch."""
        factor = self.factors.get(value.name)
        strided = factor is not None and factor.is_strided and factor.dim == 0
        return factor if strided and self._before_flattening(value) is not None else None

    def _before_flattening(self, value: Argument) -> Ref | None:
        """Return the tensor that was reshaped to a matrix; None if there is none."""
        node = self.graph.producers.get(value.name)
        flat = node is not None and node.op in RESHAPES and len(node.args[1]) == 2
        return node.args[0] if flat and node is not None else None

    def _unflatten(
        self, node: Node, value: Ref, factor: BatchFactor
    ) -> tuple[Ref, tuple[int, ...]]:
        """Write a matrix with its rows as separate dims; also return their extents."""
        rows = tuple(part for part in factor[1:] if part > 1)
        kind = self.out.tensor(value.name)
        made = TensorType((*rows, kind.shape[1]), kind.dtype)
        source = self._before_flattening(value) or value
        if self.out.tensor(source.name) == made:
            return source, rows
        return self.out.call(node, "aten.view.default", (source, made.shape), made), rows

    def _rewrite_product(self, node: Node, bias: list[Argument], left: Ref, right: Ref) -> bool:
        factor = self._flattened_batch(left)
        kind = self.out.tensor(node.outputs[0])
        if factor is None or node.kwargs:
            return False
        if bias and self.out.tensor(bias[0].name).shape != kind.shape[1:]:
            return False
        x, rows = self._unflatten(node, left, factor)
        made = TensorType((*rows, kind.shape[1]), kind.dtype)
        turned = self.graph.producers.get(right.name)
        if bias and turned is not None and turned.op == _T:
            args = (x, turned.args[0], bias[0])
            y = self.out.call(node, "aten.linear.default", args, made)
        else:
            y = self.out.call(node, "aten.matmul.default", (x, right), made)
            if bias:
                y = self.out.pointwise(node, "add.Tensor", y, bias[0])
        return self._restore(node, y)

    def _rewrite_contraction(self, node: Node, left: Ref, right: Ref) -> bool:
        """Write `mm(t(g), x)`, a sum over the rows of both, as a `tensordot`."""
        turned = self.graph.producers.get(left.name)
        if turned is None or turned.op != _T:
            return False
        factor = self._flattened_batch(turned.args[0]) or self._flattened_batch(right)
        if (
            factor is None
            or self._before_flattening(turned.args[0]) is None
            or self._before_flattening(right) is None
        ):
            return False
        (g, rows), (x, _) = (
            self._unflatten(node, side, factor) for side in (turned.args[0], right)
        )
        dims = tuple(range(len(rows)))
        made = self.out.tensor(node.outputs[0])
        return self._restore(
            node, self.out.call(node, "aten.tensordot.default", (g, x, dims, dims), made)
        )

    def _rewrite_sum(self, node: Node) -> bool:
        """Write a sum over the rows: the gradient of a bias."""
        value, dims, *_ = node.args
        factor = self._flattened_batch(value)
        if factor is None or tuple(dims) != (0,) or node.kwargs:
            return False
        x, rows = self._unflatten(node, value, factor)
        kind = self.out.tensor(node.outputs[0])
        made = TensorType(kind.shape[-1:], kind.dtype)
        args = (x, tuple(range(len(rows))))
        return self._restore(node, self.out.call(node, _SUM, args, made))

    def _restore(self, node: Node, made: Ref) -> bool:
        """Give the rewritten result the shape and the name of the node's output."""
        kind = self.out.tensor(node.outputs[0])
        self.out.call(node, "aten.view.default", (made, kind.shape), kind)
        self.out.rename_last(node)
        return True


# Merged batches


class _Apart(NamedTuple):
    """The four-dim tensor behind a batch of matrices, and whether the matrices are transposed."""

    source: str
    transposed: bool


def separate_merged_batches(graph: LogicalGraph) -> LogicalGraph:
    """Rewrite products over merged batch dims so that these are separate dims.

    before: a = view(x, [b * h, t, k]); c = view(y, [b * h, k, s]); d = bmm(a, c)
            z = view(d, [b, h, t, s])
    after:  z = matmul(x, y)                   x is [b, h, t, k], y is [b, h, k, s]
    """
    writer = GraphWriter(graph)
    found = False
    for node in graph.nodes:
        if node.op == _BMM and _rewrite(graph, writer, node):
            found = True
        else:
            writer.nodes.append(node)
    if not found:
        return graph
    return fold_views(drop_dead(writer.written()))


def _rewrite(graph: LogicalGraph, writer: GraphWriter, node: Node) -> bool:
    """Rewrite a product over separate dims; return whether its factors have them."""
    factors = [_apart(graph, value) for value in graph.tensor_inputs(node)]
    left, right = factors if len(factors) == 2 and not node.kwargs else (None, None)
    if left is None or right is None:
        return False
    batch = graph.tensor(left.source).shape[:2]
    if graph.tensor(right.source).shape[:2] != batch:
        return False
    kind = graph.tensor(node.outputs[0])
    made = TensorType((*batch, *kind.shape[1:]), kind.dtype)
    matrices = []
    for source, transposed in (left, right):
        matrix, wide = Ref(source), writer.tensor(source)
        if transposed:
            *lead, rows, columns = wide.shape
            turned = TensorType((*lead, columns, rows), wide.dtype)
            matrix = writer.call(node, _TRANSPOSE, (matrix, 2, 3), turned)
        matrices.append(matrix)
    product = writer.call(node, "aten.matmul.default", tuple(matrices), made)
    writer.call(node, "aten.view.default", (product, kind.shape), kind)
    writer.rename_last(node)
    return True


def _apart(graph: LogicalGraph, value: str) -> _Apart | None:
    """Return the tensor of a batch of matrices from before its two batch dims were merged."""
    node = graph.producers.get(value)
    if node is None or not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].name
    if node.op == _TRANSPOSE and {dim % 3 for dim in node.args[1:]} == {1, 2}:
        inner = _apart(graph, source)
        return inner and _Apart(inner.source, not inner.transposed)
    if node.op not in RESHAPES:
        return None
    before, after = graph.tensor(source).shape, graph.tensor(value).shape
    merges = len(before) == 4 and after == (before[0] * before[1], *before[2:])
    return _Apart(source, False) if merges and min(before[:2]) > 1 else None
