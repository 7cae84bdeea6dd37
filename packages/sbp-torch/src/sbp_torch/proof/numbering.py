"""Which values of two graphs are equal because they are made alike: value numbering.

A value is a *base*, what one operator call has made of given arguments, seen through a layout.
Views are worked out, not compared by name, so all ways to reshape, to transpose or to copy the same
numbers give the same value:

    graph                         value
    y = mm(x, w)                  base 2 = mm(base 0, base 1);    shape (4, 6), strides (6, 1)
    a = t(y); b = t(a)            base 2                          the same
    c = view(y, [2, 2, 6])        base 2;              shape (2, 2, 6), strides (12, 6, 1)
    d = _to_copy(y, dtype=float64)                    as y, where y is float64 already

Equal calls on equal values give one base, in one graph or in both.

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

#: The same numbers in another shape; as views of them, if that is possible.
_RESHAPE, _VIEW = "aten.reshape.default", "aten.view.default"

#: Operators that give back the numbers of their first argument, where its dtype does not change.
_COPIES = frozenset({"alias", "clone", "detach", "_to_copy", "contiguous", "lift_fresh_copy"})

#: Operators of numbers on the host, and of tensors of one element that do the same.
_ON_HOST = frozenset({"add", "sub", "mul"})


@dataclass(frozen=True, slots=True)
class Value:
    """What a name of a graph stands for.

    Args:
        base: Number of the call, or of the input, that has made its numbers.
        shape: Of the view.
        strides: In elements of the base, which lies row by row; 0 in dims of one element.
        offset: Likewise.
    """

    base: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0

    def of(self, base: Tensor) -> Tensor:
        """Return the value, given the base's numbers."""
        return base.as_strided(self.shape, self.strides, self.offset)


class Numbering:
    """The values of graphs, numbered together.

    `sizes` has the number of elements of each base.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._numbers = itertools.count()
        self.sizes: dict[int, int] = {}

    def base(self, key: Hashable, kind: ValueType) -> Value:
        """Return the whole of what has been made in some way."""
        if key not in self._known:
            self._known[key] = next(self._numbers)
        number = self._known[key]
        if not isinstance(kind, TensorType):
            self.sizes.setdefault(number, 1)
            return Value(number)
        whole = torch.empty(kind.shape, device="meta")
        self.sizes[number] = whole.numel()
        return _seen(number, whole)

    def made(self, graph: LogicalGraph, node: Node, values: Mapping[str, Value]) -> list[Value]:
        """Return the values of a node's outputs, given those of its arguments."""
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
                seen = []  # two views of other numbers than one, such as as_strided
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
        key = (op, rate, operators.frozen((node.args, named), values.__getitem__))
        return [
            self.base((key, index), graph.types[name]) for index, name in enumerate(node.outputs)
        ]

    def _views(self, node: Node, first: str, source: Value) -> list[Value]:
        """Return the views that a node makes; of a copy, where strides cannot express them."""
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
                return [_seen(source.base, one) for one in made]
            source = self.base(("copy", source), TensorType(source.shape, "float64"))
        return []


def _seen(base: int, view: Tensor) -> Value:
    pairs = zip(view.shape, view.stride(), strict=True)
    strides = tuple(0 if size == 1 else stride for size, stride in pairs)
    return Value(base, tuple(view.shape), strides, int(view.storage_offset()))


def numbered(
    graph: LogicalGraph,
    numbering: Numbering,
    key_of_input: Callable[[str], Hashable],
    settle: Callable[[Node, Iterable[Value]], Iterable[Value]] = lambda _, made: made,
    values: dict[str, Value] | None = None,
) -> dict[str, Value]:
    """Return what each name of a graph stands for.

    Args:
        graph: Any.
        numbering: Of this and of other graphs.
        key_of_input: Inputs with one key are equal.
        settle: Is given each node and what its outputs stand for, and may know better.
        values: Is filled, so that `settle` sees what came before.
    """
    found = {} if values is None else values
    for entry in graph.inputs:
        key = ("input", key_of_input(entry.name))
        found[entry.name] = numbering.base(key, graph.types[entry.name])
    for node in graph.nodes:
        made = numbering.made(graph, node, found)
        found.update(zip(node.outputs, settle(node, made), strict=True))
    return found
