"""A graph in double precision on the CPU: graphs that differ there mean different things.

before: y = mm(x, w): bfloat16[2, 3];  z = _to_copy(y, dtype=float32)
after:  y = mm(x, w): float64[2, 3];   z = _to_copy(y, dtype=float64)

Conversions between floats come to nothing, so where a pass has placed them makes no difference.
Views become reshapes, which do not ask how their arguments lie in memory. Random numbers are those
that are counted by sample, also where a run draws from a generator for each shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph import Argument, LogicalGraph, Node, Symbol, TensorType, ValueType

#: What numbers become: those of a higher precision, or the same ones.
WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}

#: What draws floats, of the default dtype if it is told none.
_RANDOM = ("random_uniform", "random_normal")

#: What takes any argument.
_RESHAPE = "aten.reshape.default"

#: What takes views of contiguous arguments only.
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def widened(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph in float64, for the CPU.

    Args:
        graph: Any; integers and booleans stay as they are.
    """
    types = {name: _wide_type(kind) for name, kind in graph.types.items()}
    nodes = tuple(_wide_node(node, types) for node in graph.nodes)
    return replace(graph, nodes=nodes, types=types)


def _wide_type(kind: ValueType) -> ValueType:
    if isinstance(kind, TensorType) and kind.dtype in WIDE:
        return replace(kind, dtype=WIDE[kind.dtype])
    return kind


def _wide_node(node: Node, types: Mapping[str, ValueType]) -> Node:
    args = tuple(map(_wide_argument, node.args))
    kwargs = {key: _wide_argument(value) for key, value in node.kwargs.items()}
    if kwargs.get("per_shard"):
        kwargs["per_shard"] = False
    makes = types[node.outputs[0]]
    reads = any(isinstance(types[value], TensorType) for value in node.inputs())
    is_factory = (node.op.startswith("aten.") and not reads) or node.kind in _RANDOM
    if is_factory and isinstance(makes, TensorType) and kwargs.get("dtype") is None:
        kwargs["dtype"] = Symbol("dtype", makes.dtype)  # the default dtype, if it is told none
    op = _RESHAPE if node.op in _VIEWS else node.op
    return replace(node, op=op, args=args, kwargs=kwargs)


def _wide_argument(argument: Argument) -> Argument:
    if isinstance(argument, Symbol):
        if argument.kind == "dtype":
            return Symbol("dtype", WIDE.get(argument.name, argument.name))
        return Symbol("device", "cpu") if argument.kind == "device" else argument
    if isinstance(argument, tuple):
        return tuple(map(_wide_argument, argument))
    return argument
