"""Where the batch lies in each value of a graph: as a dim, or as a factor of one.

The position of the batch is propagated from dim 0 of the batch inputs through the graph, by the
notation of each operator. Where that does not say it, it is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sbp_aten.passes.whole_batch.layout import Samples, reshaped
from sbp_core.errors import SignatureError
from sbp_core.graph import InputKind, LogicalGraph, Node
from sbp_core.signatures import Notation, OpCall, installed_rules

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


class BatchFactor(NamedTuple):
    """The batch as a factor of a dim: the extent of `dim` is before * batch * after."""

    dim: int
    before: int
    batch: int
    after: int

    @property
    def is_strided(self) -> bool:
        """Whether a slower factor precedes the batch, so that its parts are not contiguous."""
        return self.before > 1


def find_batch_factors(graph: LogicalGraph) -> dict[str, BatchFactor]:
    """Return the batch factor of each value in which it is known."""
    found: dict[str, BatchFactor] = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.BATCH and graph.is_tensor(entry.name):
            shape = graph.tensor(entry.name).shape
            if shape and shape[0] > 1:
                found[entry.name] = BatchFactor(0, 1, shape[0], 1)
    for node in graph.nodes:
        if node.is_host or not any(value in found for value in node.inputs()):
            continue
        if node.op in RESHAPES:
            source = found[node.args[0].name]
            shapes = (graph.tensor(value).shape for value in (node.args[0].name, node.outputs[0]))
            factor = _through_reshape(source, *shapes)
            if factor is not None:
                found[node.outputs[0]] = factor
        else:
            found |= _through_operator(graph, node, found)
    return found


def _through_reshape(
    factor: BatchFactor, before: tuple[int, ...], after: tuple[int, ...]
) -> BatchFactor | None:
    """Return the batch factor after a reshape; None if the reshape cuts through the batch."""
    samples = reshaped(Samples(factor.dim, factor.before), before, after, factor.batch)
    if samples is None:
        return None
    rest = after[samples.dim] // (samples.blocks * factor.batch)
    return BatchFactor(samples.dim, samples.blocks, factor.batch, rest)


def _through_operator(
    graph: LogicalGraph, node: Node, known: dict[str, BatchFactor]
) -> Iterator[tuple[str, BatchFactor]]:
    """Yield each output that has the label of the batch as a dim, with its batch factor."""
    try:
        call = OpCall.of(graph, node)
        notation: Notation = installed_rules().rule(call).notation(call)
    except SignatureError:  # planning says so, with all that can be done about it
        return
    inputs = zip(graph.tensor_inputs(node), notation.inputs, strict=True)
    carried = [(dims[known[name].dim], known[name]) for name, dims in inputs if name in known]
    for value, dims in zip(node.outputs, notation.outputs, strict=True):
        for labels, factor in carried:
            if len(labels) == 1 and labels in dims and labels[0] not in notation.whole:
                yield value, factor._replace(dim=dims.index(labels))
                break
