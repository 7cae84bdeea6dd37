"""Where a module goes from sample to sample of a batch, which it takes for steps of time.

x (time, samples, 4)  --view, mm, view-->  (time, samples, 16)  --unbind(0)-->  time steps
the batch is dim 0                         dim 0              goes through the batch
"""

from __future__ import annotations

from collections.abc import Collection

from sbp_aten.passes.batch_factors import find_batch_factors
from sbp_core.graph import LogicalGraph, Node, Phase

#: Recurrent networks, which go through dim 0 of their first argument.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer"})

#: Operators in which positions meet each other, and their dims along which these do not.
_ATTENTION = {"bmm": (0,), "baddbmm": (0,), "_scaled_dot_product": (0, 1)}


def samples_met(graph: LogicalGraph, modules: Collection[str]) -> Node | None:
    """Return where one of some modules goes through the samples of a batch.

    Args:
        graph: As captured, with samples along dim 0 of each tensor of the batch.
        modules: Paths of recurrent modules, and of those that attend.

    Returns:
        The first such node of the forward phase; None if there is none that is known.
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
    """Whether a call goes through a dim of its first argument."""
    if node.kind == "unbind":
        return dim == (node.args[1] if len(node.args) > 1 else 0)
    if node.kind in _RECURRENT:
        return dim == 0
    free = (dims for kind, dims in _ATTENTION.items() if node.kind.startswith(kind))
    return dim not in next(free, (dim,))
