"""Queries of passes about operators: which may return views, and other traits of theirs."""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.graph.ir import LogicalGraph
from sbp_core.signatures.registry import installed_rules
from sbp_core.signatures.rule import OperatorTraits


def is_view(op: str) -> bool:
    """Whether results of an operator may alias its arguments.

    Such operators cost no memory and next to no time.

    Args:
        op: Operator and overload, `aten.view.default`.
    """
    return installed_rules().is_view(op)


def traits_of(op: str) -> OperatorTraits:
    """Return the traits of the namespace that an operator is in, as the installed rules have them.

    Args:
        op: Operator and overload, `aten.view.default`.
    """
    return installed_rules().traits(op)


def aliased_inputs(graph: LogicalGraph, value: str) -> Iterator[str]:
    """Yield the graph inputs that a value is, or may alias."""
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
