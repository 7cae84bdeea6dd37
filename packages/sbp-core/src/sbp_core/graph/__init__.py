"""The logical graph: IR, file format, specification, passes. In the order a program meets them."""

from __future__ import annotations

from sbp_core.graph.ir import LogicalGraph, Node, Ref, TensorType
from sbp_core.graph.serialize import from_json, graph_hash, to_json
from sbp_core.graph.spec import verify_graph

__all__ = [
    "LogicalGraph",
    "Node",
    "Ref",
    "TensorType",
    "from_json",
    "graph_hash",
    "to_json",
    "verify_graph",
]
