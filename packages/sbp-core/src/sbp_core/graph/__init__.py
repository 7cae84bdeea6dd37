"""The logical graph: one training step as an immutable value, its file format, and its verifier."""

from __future__ import annotations

from sbp_core.graph.ir import (
    ITEMSIZE,
    Argument,
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    ScalarType,
    Symbol,
    TensorType,
    ValueType,
    block_of,
    map_refs,
    refs,
)
from sbp_core.graph.primitives import ACCUMULATE, STACK
from sbp_core.graph.rewrite import drop_dead, rename_outputs, rename_uses
from sbp_core.graph.serialize import GRAPH, graph_hash
from sbp_core.graph.spec import verify_graph

__all__ = [
    "ACCUMULATE",
    "GRAPH",
    "ITEMSIZE",
    "STACK",
    "Argument",
    "GraphInput",
    "GraphOutput",
    "InputKind",
    "LogicalGraph",
    "Node",
    "OutputKind",
    "Phase",
    "Rate",
    "Ref",
    "ScalarType",
    "Symbol",
    "TensorType",
    "ValueType",
    "block_of",
    "drop_dead",
    "graph_hash",
    "map_refs",
    "refs",
    "rename_outputs",
    "rename_uses",
    "verify_graph",
]
