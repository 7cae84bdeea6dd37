"""Tell passes, compiler and planners which operators return views, or have an in-place form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sbp_core.graph.ir import LogicalGraph
from sbp_core.signatures.rule import OperatorTraits
from sbp_core.signatures.rule_registry import installed_rules


def is_view(op: str) -> bool:
    """Whether results of an operator may alias its arguments.

    Such operators take no memory and almost no time.

    Args:
        op: Operator and overload, `aten.view.default`.
    """
    return installed_rules().is_view(op)


def traits_of(op: str) -> OperatorTraits:
    """Return the traits of an operator's namespace, from the installed rules.

    Args:
        op: Operator and overload, `aten.view.default`.
    """
    return installed_rules().traits(op)


@dataclass(frozen=True, slots=True)
class InPlaceForm:
    """The form of an operator that writes its results over arguments, and returns them.

    Args:
        op: Its name, `aten.add_.Tensor`.
        over: For each result the number of the argument that it is written over, with lists
            flattened.
    """

    op: str
    over: tuple[int, ...]


def in_place_form(op: str) -> InPlaceForm | None:
    """Return the in-place form of an operator, or None if it has none.

    Args:
        op: Operator and overload, `aten.add.Tensor`.
    """
    namespace, kind, overload = (*op.split("."), "", "")[:3]
    over = traits_of(op).in_place.get(kind)
    return None if over is None else InPlaceForm(f"{namespace}.{kind}_.{overload}", over)


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
