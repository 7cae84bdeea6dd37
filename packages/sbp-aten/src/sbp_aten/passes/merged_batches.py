"""Batched products over merged batch dims, rewritten so that these are dims of their own.

PyTorch writes `q @ k.mT` over (batch, heads, times, features) as a product of a batch of matrices,
one for each pair of batch and head. Split heads are no contiguous part of such pairs, so that every
rank would have to gather all of them. Products of the same numbers over separate dims leave both
dims that can be split:

    q (b h) t k, k (b h) k s -> (b h) t s      bmm      only the batch can be split
    q b h t k,   k b h k s   -> b h t s        matmul   so can heads

It is the same kernel: `matmul` merges the dims again, of what a rank has of them.
"""

from __future__ import annotations

from typing import NamedTuple

from sbp_aten.passes.simplify import fold_views
from sbp_core.graph import LogicalGraph, Node, Ref, TensorType, drop_dead
from sbp_core.passes import GraphWriter

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_TRANSPOSE = "aten.transpose.int"
_BMM = "aten.bmm.default"


class _Apart(NamedTuple):
    """The tensor of four dims that became a batch of matrices, and whether these are transposed."""

    source: str
    transposed: bool


def separate_merged_batches(graph: LogicalGraph) -> LogicalGraph:
    """Rewrite products over merged batch dims so that these are dims of their own.

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
    return fold_views(drop_dead(graph.with_nodes(tuple(writer.nodes), types=writer.types)))


def _rewrite(graph: LogicalGraph, writer: GraphWriter, node: Node) -> bool:
    """Write a product over separate dims; return whether its factors have them."""
    factors = [_apart(graph, value) for value in graph.tensor_inputs(node)]
    left, right = factors if len(factors) == 2 and not node.kwargs else (None, None)
    if left is None or right is None:
        return False
    batch = graph.tensor(left.source).shape[:2]
    if graph.tensor(right.source).shape[:2] != batch:
        return False
    kind = graph.tensor(node.outputs[0])
    made = TensorType((*batch, *kind.shape[1:]), kind.dtype)
    matrices = tuple(_matrices(writer, node, factor) for factor in (left, right))
    product = writer.call(node, "aten.matmul.default", matrices, made)
    writer.call(node, "aten.view.default", (product, kind.shape), kind)
    writer.rename_last(node)
    return True


def _apart(graph: LogicalGraph, value: str) -> _Apart | None:
    """Return what a batch of matrices was before its two batch dims were merged."""
    node = graph.producers.get(value)
    if node is None or not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].name
    if node.op == _TRANSPOSE and {dim % 3 for dim in node.args[1:]} == {1, 2}:
        inner = _apart(graph, source)
        return inner and _Apart(inner.source, not inner.transposed)
    if node.op not in _RESHAPES:
        return None
    before, after = graph.tensor(source).shape, graph.tensor(value).shape
    merges = len(before) == 4 and after == (before[0] * before[1], *before[2:])
    return _Apart(source, False) if merges and min(before[:2]) > 1 else None


def _matrices(writer: GraphWriter, node: Node, factor: _Apart) -> Ref:
    if not factor.transposed:
        return Ref(factor.source)
    kind = writer.tensor(factor.source)
    *batch, rows, columns = kind.shape
    made = TensorType((*batch, columns, rows), kind.dtype)
    return writer.call(node, _TRANSPOSE, (Ref(factor.source), 2, 3), made)
