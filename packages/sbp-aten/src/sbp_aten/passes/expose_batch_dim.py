"""Products that keep the batch apart: where it is not the slowest of several flattened dims.

PyTorch writes a layer over (times, batch, features) as a matrix product over rows (times * batch).
Sequences whose batch is the second dim are common: `nn.MultiheadAttention` and the recurrent layers
compute so inside, also with `batch_first`. A split batch is no contiguous part of such rows, so
that every rank would have to gather all of them. Products of the same numbers over separate dims do
not bury the batch:

    x (t b) i, w i o -> (t b) o        mm        rows whole
    x t b i,   w i o -> t b o          matmul    S(1), as the batch is split
    g t b o,   x t b i -> o i          tensordot: the gradient of the weight, partial sums

Where the batch is, is followed through the graph from dim 0 of the batch inputs, by the notation of
each operator. What cannot be followed stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from sbp_aten.passes.simplify import fold_views
from sbp_core.errors import SignatureError
from sbp_core.graph import Argument, InputKind, LogicalGraph, Node, Ref, TensorType, drop_dead
from sbp_core.passes import Writer
from sbp_core.signatures import Notation, OpCall, installed

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_T = "aten.t.default"
_MM = "aten.mm.default"
_ADDMM = "aten.addmm.default"
_SUM = "aten.sum.dim_IntList"


class _Place(NamedTuple):
    """Where the batch is: within `dim`, whose extent is before * batch * after."""

    dim: int
    before: int
    batch: int
    after: int

    @property
    def is_buried(self) -> bool:
        """Whether parts of the batch are no contiguous parts of the dim."""
        return self.before > 1


def expose_batch_dim(graph: LogicalGraph) -> LogicalGraph:
    """Write products over rows in which the batch is buried with the batch as a dim of its own.

    before: a = view(x, [t * b, i]); y = mm(a, w); z = view(y, [t, b, o])
    after:  z = matmul(x, w)                          x is [t, b, i]
    """
    places = _places(graph) if any(map(_may_bury, graph.nodes)) else {}
    if not any(place.is_buried for place in places.values()):
        return graph
    writer = _Writing(graph, places)
    for node in graph.nodes:
        if not writer.wrote(node):
            writer.out.nodes.append(node)
    nodes, types = tuple(writer.out.nodes), writer.out.types
    return fold_views(drop_dead(graph.with_nodes(nodes, types=types)))


def _may_bury(node: Node) -> bool:
    return node.op in _RESHAPES and len(node.args[1]) == 2


def _places(graph: LogicalGraph) -> dict[str, _Place]:
    """Return where the batch is in each value in which that is known."""
    found: dict[str, _Place] = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.BATCH and graph.is_tensor(entry.name):
            shape = graph.tensor(entry.name).shape
            if shape and shape[0] > 1:
                found[entry.name] = _Place(0, 1, shape[0], 1)
    for node in graph.nodes:
        if node.is_host or not any(value in found for value in node.inputs()):
            continue
        if node.op in _RESHAPES:
            source = found[node.args[0].name]
            shapes = (graph.tensor(value).shape for value in (node.args[0].name, node.outputs[0]))
            moved = _reshaped(source, *shapes)
            if moved is not None:
                found[node.outputs[0]] = moved
        else:
            found |= _followed(graph, node, found)
    return found


def _reshaped(place: _Place, before: tuple[int, ...], after: tuple[int, ...]) -> _Place | None:
    """Return where the batch is after a reshape: elements keep their order."""
    inner = prod(before[place.dim + 1 :]) * place.after
    for dim in range(len(after)):
        behind = prod(after[dim + 1 :])
        fits = inner % behind == 0 and after[dim] % (place.batch * (inner // behind)) == 0
        if behind <= inner < behind * after[dim] and fits:
            rest = inner // behind
            return _Place(dim, after[dim] // (place.batch * rest), place.batch, rest)
    return None


def _followed(
    graph: LogicalGraph, node: Node, known: dict[str, _Place]
) -> Iterator[tuple[str, _Place]]:
    """Yield the outputs that have the label of the batch as a dim, and where."""
    try:
        call = OpCall.of(graph, node)
        notation: Notation = installed().rule(call).notation(call)
    except SignatureError:  # planning says so, with all that can be done about it
        return
    inputs = zip(graph.tensor_inputs(node), notation.inputs, strict=True)
    carried = [(dims[known[name].dim], known[name]) for name, dims in inputs if name in known]
    for value, dims in zip(node.outputs, notation.outputs, strict=True):
        for labels, place in carried:
            if len(labels) == 1 and labels in dims and labels[0] not in notation.whole:
                yield value, place._replace(dim=dims.index(labels))
                break


class _Writing:
    """The writing of the products of one graph.

    Args:
        graph: What is rewritten.
        places: Where the batch is.
    """

    def __init__(self, graph: LogicalGraph, places: dict[str, _Place]) -> None:
        self.graph, self.places = graph, places
        self.out = Writer(graph)

    def wrote(self, node: Node) -> bool:
        """Write a node in another way, if it is a product or a sum over such rows."""
        if node.op in (_MM, _ADDMM):
            *bias, left, right = node.args
            if self._rows(left) is not None:
                return self._product(node, bias, left, right)
            return not bias and self._contraction(node, left, right)
        return node.op == _SUM and self._sum(node)

    def _rows(self, value: Argument, dim: int = 0) -> _Place | None:
        """Return where the batch is buried in the rows of a matrix that was reshaped to it."""
        place = self.places.get(value.name)
        if place is None or not place.is_buried or place.dim != dim or self._matrix(value) is None:
            return None
        return place

    def _matrix(self, value: Argument) -> Ref | None:
        """Return what a matrix is a reshape of."""
        node = self.graph.producers.get(value.name)
        flat = node is not None and node.op in _RESHAPES and len(node.args[1]) == 2
        return node.args[0] if flat and node is not None else None

    def _apart(self, node: Node, value: Ref, place: _Place) -> tuple[Ref, tuple[int, ...]]:
        """Write a matrix with the dims of its rows apart; also return these."""
        rows = tuple(part for part in place[1:] if part > 1)
        kind = self.out.tensor(value.name)
        made = TensorType((*rows, kind.shape[1]), kind.dtype)
        source = self._matrix(value) or value
        if self.out.tensor(source.name) == made:
            return source, rows
        return self.out.call(node, "aten.view.default", (source, made.shape), made), rows

    def _product(self, node: Node, bias: list[Argument], left: Ref, right: Ref) -> bool:
        place = self._rows(left)
        kind = self.out.tensor(node.outputs[0])
        if place is None or node.kwargs:
            return False
        if bias and self.out.tensor(bias[0].name).shape != kind.shape[1:]:
            return False
        x, rows = self._apart(node, left, place)
        made = TensorType((*rows, kind.shape[1]), kind.dtype)
        turned = self.graph.producers.get(right.name)
        if bias and turned is not None and turned.op == _T:
            args = (x, turned.args[0], bias[0])
            y = self.out.call(node, "aten.linear.default", args, made)
        else:
            y = self.out.call(node, "aten.matmul.default", (x, right), made)
            if bias:
                y = self.out.call(node, "aten.add.Tensor", (y, bias[0]), made, pointwise=True)
        return self._named(node, y)

    def _contraction(self, node: Node, left: Ref, right: Ref) -> bool:
        """Write `mm(t(g), x)`, a sum over the rows of both."""
        turned = self.graph.producers.get(left.name)
        if turned is None or turned.op != _T:
            return False
        place = self._rows(turned.args[0]) or self._rows(right)
        if place is None or self._matrix(turned.args[0]) is None or self._matrix(right) is None:
            return False
        (g, rows), (x, _) = (self._apart(node, side, place) for side in (turned.args[0], right))
        dims = tuple(range(len(rows)))
        made = self.out.tensor(node.outputs[0])
        return self._named(
            node, self.out.call(node, "aten.tensordot.default", (g, x, dims, dims), made)
        )

    def _sum(self, node: Node) -> bool:
        """Write a sum over the rows: the gradient of a bias."""
        value, dims, *_ = node.args
        place = self._rows(value)
        if place is None or tuple(dims) != (0,) or node.kwargs:
            return False
        x, rows = self._apart(node, value, place)
        kind = self.out.tensor(node.outputs[0])
        made = TensorType(kind.shape[-1:], kind.dtype)
        args = (x, tuple(range(len(rows))))
        return self._named(node, self.out.call(node, _SUM, args, made))

    def _named(self, node: Node, made: Ref) -> bool:
        """Give what was written the shape and the name of what the node made."""
        kind = self.out.tensor(node.outputs[0])
        self.out.call(node, "aten.view.default", (made, kind.shape), kind)
        self.out.rename_last(node)
        return True
