"""Find the batch in each value of a graph: as a dim, or as a factor of a dim.

The position of the batch is propagated from dim 0 of the batch inputs through the graph, by the
notation of each operator; it is unknown where the notation does not determine it. `batch_dim` uses
it. `samples_met` also finds modules that step through the samples of a batch by mistake, as if they
were time steps:

    x (time, samples, 4)  --view, mm, view-->  (time, samples, 16)  --unbind(0)-->  time steps
    the batch is dim 0                         dim 0              goes through the batch
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from sbp_aten.passes.whole_batch.layout import Samples, reshaped
from sbp_core.errors import SignatureError
from sbp_core.graph import InputKind, LogicalGraph, Node, Phase
from sbp_core.signatures import Notation, OpCall, installed_rules

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")

#: Recurrent networks, which step through dim 0 of their first argument.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer"})

#: Operators that combine all positions -> the dims along which they do not.
_ATTENTION = {"bmm": (0,), "baddbmm": (0,), "_scaled_dot_product": (0, 1)}


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
    """Return the batch factor of each value, where it is known."""
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
            dim, blocks, batch, _ = found[node.args[0].name]
            before, after = (graph.tensor(v).shape for v in (node.args[0].name, node.outputs[0]))
            samples = reshaped(Samples(dim, blocks), before, after, batch)
            if samples is not None:  # else the reshape cuts through the batch
                rest = after[samples.dim] // (samples.blocks * batch)
                found[node.outputs[0]] = BatchFactor(samples.dim, samples.blocks, batch, rest)
        else:
            found |= _through_operator(graph, node, found)
    return found


def _through_operator(
    graph: LogicalGraph, node: Node, known: dict[str, BatchFactor]
) -> Iterator[tuple[str, BatchFactor]]:
    """Yield each output with a dim that is the label of the batch, and its batch factor."""
    try:
        call = OpCall.of(graph, node)
        notation: Notation = installed_rules().rule(call).notation(call)
    except SignatureError:  # planning raises it again, with advice
        return
    inputs = zip(graph.tensor_inputs(node), notation.inputs, strict=True)
    carried = [(dims[known[name].dim], known[name]) for name, dims in inputs if name in known]
    for value, dims in zip(node.outputs, notation.outputs, strict=True):
        for labels, factor in carried:
            if len(labels) == 1 and labels in dims and labels[0] not in notation.whole:
                yield value, factor._replace(dim=dims.index(labels))
                break


def samples_met(graph: LogicalGraph, modules: Collection[str]) -> Node | None:
    """Return the first node at which one of some modules steps through the samples of a batch.

    Args:
        graph: A captured graph, with samples along dim 0 of each tensor of the batch.
        modules: Paths of recurrent modules and of attention modules.

    Returns:
        The first such node of the forward phase; None if none is known.
    """
    factors = find_batch_factors(graph) if modules else {}
    for node in graph.nodes:
        inputs = node.inputs()
        if node.module not in modules or node.phase is not Phase.FORWARD or not inputs:
            continue
        factor = factors.get(inputs[0])
        if factor is not None and not factor.is_strided and _meet(node, factor.dim):
            return node
    return None


def _meet(node: Node, dim: int) -> bool:
    """Whether a call combines the positions along a dim of its first argument."""
    if node.kind == "unbind":
        return dim == (node.args[1] if len(node.args) > 1 else 0)
    if node.kind in _RECURRENT:
        return dim == 0
    free = (dims for kind, dims in _ATTENTION.items() if node.kind.startswith(kind))
    return dim not in next(free, (dim,))
