"""Run-time estimates of graphs in double precision, on one server core.

Only orders of magnitude: a proof has to know whether something takes a second or an hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from sbp_core.errors import SbpError
from sbp_core.graph import LogicalGraph, Node, TensorType
from sbp_core.signatures import OpCall, work_flop

#: Rates of one server core in double precision, in flop/s and bytes/s; and seconds of a call.
_FLOP_PER_S = 10e9
_BYTES_PER_S = 0.5e9
_CALL_S = 20e-6


def run_s(graph: LogicalGraph, nodes: Iterable[Node]) -> float:
    """Return the estimated seconds of some nodes of a graph in one step of all micro-batches."""
    total_s = 0.0
    for node in nodes:
        each_s = _CALL_S
        if not node.is_host and "view" not in node.tags:
            kinds = [graph.types[name] for name in (*node.inputs(), *node.outputs)]
            each_s += bytes_s(sum(one.size_bytes for one in kinds if isinstance(one, TensorType)))
            with suppress(SbpError):
                each_s += work_flop(OpCall.of(graph, node)) / _FLOP_PER_S
        total_s += graph.repetitions[node.rate] * each_s
    return total_s


def bytes_s(num_bytes: int) -> float:
    """Return the estimated seconds to read or write some bytes."""
    return num_bytes / _BYTES_PER_S
