"""Value numbering: find values of two graphs that are equal because equal calls compute them.

A value is a layout (shape, strides, offset) of a *base*, the result of one operator call on given
arguments. Layouts of views are computed, so all ways to reshape, transpose or copy the same numbers
give the same value:

    graph                         value
    y = mm(x, w)                  base 2 = mm(base 0, base 1);    shape (4, 6), strides (6, 1)
    a = t(y); b = t(a)            base 2                          the same
    c = view(y, [2, 2, 6])        base 2;              shape (2, 2, 6), strides (12, 6, 1)
    d = _to_copy(y, dtype=float64)                    the same as y, if y is float64

Equal calls on equal values give one base, in one graph or in both. `parts` uses it for proofs.

Source: value numbering: Alpern, Wegman, Zadeck, "Detecting equality of variables in programs",
POPL 1988.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.graph import (
    LogicalGraph,
    Node,
    TensorType,
    ValueType,
)
from sbp_core.signatures import is_view
from sbp_torch.ops import operators

#: Operators that change a shape; they return a view if that is possible.
_RESHAPE, _VIEW = "aten.reshape.default", "aten.view.default"

#: Operators that return the numbers of their first argument, if its dtype does not change.
_COPIES = frozenset({"alias", "clone", "detach", "_to_copy", "contiguous", "lift_fresh_copy"})

#: Operators that do the same for numbers on the host and for tensors without dims.
_ON_HOST = frozenset({"add", "sub", "mul"})


@dataclass(frozen=True, slots=True)
class Value:
    """The value that a name of a graph stands for.

    Args:
        base: Number of the base: the result of a call, or an input.
        shape: Shape of the view.
        strides: Strides in elements of the base, which is contiguous; 0 in dims of one element.
        offset: Offset in elements of the base.
    """

    base: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0

    def of(self, base: Tensor) -> Tensor:
        """Return the value as a view of the base's numbers."""
        return base.as_strided(self.shape, self.strides, self.offset)


class Numbering:
    """The numbered values of several graphs, which share the numbers.

    Attributes:
        sizes: Base -> number of elements.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._numbers = itertools.count()
        self.sizes: dict[int, int] = {}

    def base(self, key: Hashable, kind: ValueType) -> Value:
        """Return a whole base; equal keys stand for equal numbers."""
        if key not in self._known:
            self._known[key] = next(self._numbers)
        number = self._known[key]
        if not isinstance(kind, TensorType):
            self.sizes.setdefault(number, 1)
            return Value(number)
        whole = torch.empty(kind.shape, device="meta")
        self.sizes[number] = whole.numel()
        return _view_value(number, whole)

    def outputs(self, graph: LogicalGraph, node: Node, values: Mapping[str, Value]) -> list[Value]:
        """Return the values of a node's outputs, given the values of its arguments."""
        first = next(iter(node.inputs()), None)
        if first is not None and len(node.outputs) == 1:
            given = graph.types[first]
            is_copy = node.kind in _COPIES and isinstance(given, TensorType)
            is_copy = is_copy and graph.types[node.outputs[0]] == given
            if is_copy or node.op in ("host.item", "host.float", "sbp.after"):
                return [values[first]]
        if first is not None and (is_view(node.op) or node.op in ("sbp.piece", _RESHAPE)):
            try:
                seen = self._views(node, first, values[first])
            except (RuntimeError, ValueError, IndexError, TypeError):
                seen = []  # the view cannot be expressed on the base, as for some as_strided
            kinds = [graph.types[name] for name in node.outputs]
            if [one.shape for one in seen] == [getattr(kind, "shape", ()) for kind in kinds]:
                return seen
        op: Hashable = node.op
        kinds_in = (graph.types[name] for name in node.inputs())
        is_number = (not isinstance(one, TensorType) or one.shape == () for one in kinds_in)
        if node.kind in _ON_HOST and all(is_number):
            op = f"host.{node.kind}"
        rate = node.rate if graph.num_micro_batches > 1 else None
        named = tuple(sorted(node.kwargs.items()))
        key = (op, rate, operators.freeze((node.args, named), values.__getitem__))
        return [
            self.base((key, index), graph.types[name]) for index, name in enumerate(node.outputs)
        ]

    def _views(self, node: Node, first: str, source: Value) -> list[Value]:
        """Return the views that a node makes; views of a copy, if strides cannot express them."""
        for _ in range(2):
            seen = source.of(torch.empty(self.sizes[source.base], device="meta"))
            with suppress(RuntimeError):
                if node.op == "sbp.piece":
                    dim, index, count = node.args[2:5]
                    made: Iterable[Any] = [
                        seen[(slice(None),) * dim + (slice(index, None, count),)]
                    ]
                else:
                    op, read = _VIEW if node.op == _RESHAPE else node.op, {first: seen}.__getitem__
                    made = operators.call(op, node.args, node.kwargs, read)
                return [_view_value(source.base, one) for one in made]
            source = self.base(("copy", source), TensorType(source.shape, "float64"))
        return []


def _view_value(base: int, view: Tensor) -> Value:
    pairs = zip(view.shape, view.stride(), strict=True)
    strides = tuple(0 if size == 1 else stride for size, stride in pairs)
    return Value(base, tuple(view.shape), strides, int(view.storage_offset()))


def number_values(
    graph: LogicalGraph,
    numbering: Numbering,
    key_of_input: Callable[[str], Hashable],
    settle: Callable[[Node, Iterable[Value]], Iterable[Value]] = lambda _, made: made,
    values: dict[str, Value] | None = None,
) -> dict[str, Value]:
    """Return the value of each name of a graph.

    Args:
        graph: The graph.
        numbering: The numbers, shared by several graphs; new values are added.
        key_of_input: Returns a key of an input; inputs with one key are equal.
        settle: Function of each node and the values of its outputs, which may replace the values.
        values: Mapping to fill and return, so that `settle` sees earlier values.
    """
    found = {} if values is None else values
    for entry in graph.inputs:
        key = ("input", key_of_input(entry.name))
        found[entry.name] = numbering.base(key, graph.types[entry.name])
    for node in graph.nodes:
        made = numbering.outputs(graph, node, found)
        found.update(zip(node.outputs, settle(node, made), strict=True))
    return found
