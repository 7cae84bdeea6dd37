"""Which values may lie in the memory of others: whatever asks so, asks here."""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.graph.ir import LogicalGraph
from sbp_core.signatures.registry import installed


def is_view(op: str) -> bool:
    """Whether results of an operator may lie in the memory of its arguments.

    Such operators cost no memory and next to no time.

    Args:
        op: Operator and overload, `aten.view.default`.
    """
    return installed().is_view(op)


def seen_inputs(graph: LogicalGraph, value: str) -> Iterator[str]:
    """Yield the graph inputs that a value is, or may lie in the memory of."""
    todo, met = [value], {value}
    while todo:
        one = todo.pop()
        node = graph.producers.get(one)
        if node is None:
            yield one
        elif is_view(node.op):
            new = [name for name in graph.tensor_inputs(node) if name not in met]
            met.update(new)
            todo += new
