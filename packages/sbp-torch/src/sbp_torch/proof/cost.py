"""How long running operators takes, roughly: what a proof has to know before it runs them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from sbp_core.errors import SbpError
from sbp_core.graph import LogicalGraph, Node, TensorType
from sbp_core.signatures import OpCall, work_flop

#: Of one core of a server, in double precision, flop/s and bytes/s; and seconds of a call.
#: Only an order of magnitude: a proof asks whether something takes a second or an hour.
_FLOP_PER_S = 10e9
_BYTES_PER_S = 0.5e9
_CALL_S = 20e-6


def run_s(graph: LogicalGraph, nodes: Iterable[Node]) -> float:
    """Return the seconds that some nodes of a graph take in one step, all micro-batches."""
    return sum(graph.repetitions[node.rate] * _node_s(graph, node) for node in nodes)


def bytes_s(num_bytes: int) -> float:
    """Return the seconds in which so many bytes are read or written."""
    return num_bytes / _BYTES_PER_S


def _node_s(graph: LogicalGraph, node: Node) -> float:
    if node.is_host:
        return _CALL_S
    kinds = [graph.types[name] for name in (*node.inputs(), *node.outputs)]
    num_bytes = sum(kind.size_bytes for kind in kinds if isinstance(kind, TensorType))
    flop = 0.0
    with suppress(SbpError):
        flop = work_flop(OpCall.of(graph, node))
    if "view" in node.tags:
        return _CALL_S
    return _CALL_S + flop / _FLOP_PER_S + bytes_s(num_bytes)
