"""Find gradients of tables that come from lookups, and write them as rows and sums by row.

embedding_dense_backward(dy, i, rows, padding)     place i[n] has the gradient dy[n]
_embedding_bag_backward(dy, i, offsets, ..)        place i[n] has that of its bag, times its
                                                   weight, divided by the size of the bag
add(a, b)                                          the places of both
mul(a, number), div, neg                           these, scaled
sbp.accumulate(a, number)                          those of all micro-batches, scaled
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from sbp_core.graph import (
    ACCUMULATE,
    STACK,
    Argument,
    LogicalGraph,
    Node,
    Phase,
    Rate,
    Ref,
    Symbol,
    TensorType,
    ValueType,
)

__all__ = ["Lookups", "NoRows", "RowSums"]

#: PyTorch's numbers for `mode=` of embedding bags.
_SUM, _MEAN = 0, 1

#: Kinds of the pointwise operators that this module adds.
_POINTWISE = frozenset({"div", "eq", "masked_fill", "mul", "neg", "sub"})

#: Linear operators of one gradient and of numbers.
_SCALED = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")


class NoRows(Exception):  # noqa: N818 - no error: the update stays as it is
    """An update is not rewritten; the text says why.

    Args:
        reason: Why; empty for a parameter that is no table.
        is_small: Whether the reason is that the table is small.
    """

    def __init__(self, reason: str = "", *, is_small: bool = False) -> None:
        super().__init__(reason)
        self.is_small = is_small


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """The gradient of a table by rows.

    Args:
        rows: The value with the distinct rows [N].
        sums: The values with their gradients [N, d].
        types: The types of new values.
        nodes: New nodes, by the name of the node before which each comes.
    """

    rows: str
    sums: tuple[str, ...]
    types: Mapping[str, ValueType]
    nodes: Mapping[str, list[Node]]


#: Indices and gradients of the places of one lookup.
_Places = tuple[str, str]


class Lookups:
    """The lookups of one table.

    Args:
        graph: A training step.
        table: The type of the table.
    """

    def __init__(self, graph: LogicalGraph, table: TensorType) -> None:
        self.graph, self.table = graph, table
        self._sources: dict[str, int] = {}
        for node in graph.nodes:
            count = self._count(node)
            if count is not None:
                self._sources[node.outputs[0]] = count
        self._types: dict[str, ValueType] = {}
        self._nodes: dict[str, list[Node]] = defaultdict(list)
        #: New values by their calls: several gradients may have the same places.
        self._made: dict[tuple[str, str, str, str], str] = {}

    def roots(self, new: str) -> list[str]:
        """Return the sums over places that the new value of a table is computed from, row by row.

        Args:
            new: The new value.
        """
        rows, found = self.table.shape[0], dict[str, None]()
        seen, left = {new}, [new]
        while left:
            value = left.pop()
            if value in self._sources:
                found[value] = None
            elif value in self.graph.producers:
                # A factor of all rows, such as that of clipping, depends on other tables as well.
                given = self.graph.tensor_inputs(self.graph.producers[value])
                more = [v for v in given if self.graph.tensor(v).shape[:1] == (rows,)]
                left += [v for v in more if v not in seen]
                seen.update(more)
        return list(found)

    def count(self, roots: list[str]) -> int:
        """Return the number of places of a step."""
        return max(self._sources[root] for root in roots)

    def _count(self, node: Node) -> int | None:
        """Return how many places the result of a node is a sum over; None if it is no such sum."""
        graph = self.graph
        kind = graph.types[node.outputs[0]]
        is_tall = isinstance(kind, TensorType) and len(kind.shape) == 2
        if not is_tall or graph.tensor(node.outputs[0]).shape[0] != self.table.shape[0]:
            return None
        args = node.args
        if node.op == "aten.embedding_dense_backward.default":
            return None if args[4] else prod(graph.tensor(args[1].name).shape)
        if node.op == "aten._embedding_bag_backward.default":
            is_plain = not args[7] and args[8] in (_SUM, _MEAN)
            return graph.tensor(args[1].name).shape[0] if is_plain else None
        parts = [self._sources.get(value) for value in graph.tensor_inputs(node)]
        if node.op == "aten.add.Tensor" and not node.kwargs and len(parts) == 2:
            left, right = parts
            return None if left is None or right is None else left + right
        if node.op == ACCUMULATE and parts[0] is not None and _is_number(args[1]):
            rate = graph.rate_of(node.outputs[0])
            return parts[0] * graph.repetitions[Rate.MICRO] // graph.repetitions[rate]
        if node.phase is Phase.OPTIMIZER or graph.num_micro_batches == 1:
            return None  # the update works on sums by row
        scales = node.op == "aten.neg.default" or (
            node.op in _SCALED and len(args) == 2 and self._is_scalar(args[1])
        )
        return parts[0] if scales else None

    def _is_scalar(self, argument: Argument) -> bool:
        if isinstance(argument, Ref):
            kind = self.graph.types[argument.name]
            return not isinstance(kind, TensorType) or not kind.shape
        return _is_number(argument)

    def unique(self, roots: Sequence[str], user: Node) -> RowSums:
        """Write gradients as rows and sums by row.

        Args:
            roots: From `roots`.
            user: The first node that uses one of them.

        Raises:
            NoRows: they come from different lookups.
        """
        joined = [self._joined(root, user) for root in roots]
        index = joined[0][0]
        if any(other != index for other, _ in joined):
            raise NoRows("its update takes gradients of several lookups")
        count = prod(self._kind(index).shape)
        rows, sums = f"{roots[0]}.rows", tuple(f"{root}.sums" for root in roots)
        self._types[rows] = replace(self._kind(index), shape=(count,))
        for name, (_, part) in zip(sums, joined, strict=True):
            kind = self._kind(part)
            self._types[name] = replace(kind, shape=(count, kind.shape[-1]))
        node = replace(
            self.graph.producers[roots[0]],
            name=rows,
            op="sbp.unique_rows.default",
            args=(Ref(index), tuple(Ref(part) for _, part in joined)),
            kwargs={},
            outputs=(rows, *sums),
            phase=Phase.OPTIMIZER,
            rate=user.rate,
            forward="",
            tags=(),
        )
        self._nodes[user.name].append(node)
        return RowSums(rows=rows, sums=sums, types=self._types, nodes=self._nodes)

    def _joined(self, root: str, user: Node) -> _Places:
        """Return the places of all lookups that a gradient is a sum over."""
        places = self._places(root)
        if len(places) == 1:
            return places[0]
        flat = [self._flat(pair, user) for pair in places]
        made = []
        for at, what in enumerate(("places", "parts")):
            kind = self._kind(flat[0][at])
            kind = replace(kind, shape=(self._sources[root], *kind.shape[1:]))
            args = (tuple(Ref(pair[at]) for pair in flat),)
            made.append(
                self._add(user, user.name, f"{root}.{what}", "aten.cat.default", args, kind)
            )
        return made[0], made[1]

    def _kind(self, value: str) -> TensorType:
        found = self._types.get(value) or self.graph.types[value]
        assert isinstance(found, TensorType), value
        return found

    def _flat(self, places: _Places, user: Node) -> _Places:
        """Return the places of one lookup without dims, but the columns."""
        made = []
        for value, kept in zip(places, ((), self._kind(places[1]).shape[-1:]), strict=True):
            kind = self._kind(value)
            shape = (prod(self._kind(places[0]).shape), *kept)
            args = (Ref(value), shape)
            kind = replace(kind, shape=shape)
            made.append(
                self._add(user, user.name, f"{value}.flat", "aten.reshape.default", args, kind)
            )
        return made[0], made[1]

    def _add(
        self,
        like: Node,
        before: str,
        name: str,
        op: str,
        args: tuple[Argument, ...],
        kind: TensorType,
        *,
        shared: bool = False,
        **kwargs: Argument,
    ) -> str:
        """Add a node like another one, before a node, unless there is one; return its result."""
        # Indices are used late, so nodes of equal indices are shared wherever they are.
        call = op, repr(args), repr(kwargs), "" if shared else before
        if call in self._made:
            return self._made[call]
        while name in self._types or name in self.graph.types:
            name += "_"
        self._types[name] = kind
        tags = ("pointwise",) if op.split(".")[1] in _POINTWISE else ()
        node = replace(like, name=name, op=op, args=args, kwargs=kwargs, outputs=(name,), tags=tags)
        self._nodes[before].append(node)
        self._made[call] = name
        return name

    def _places(self, value: str) -> list[_Places]:
        """Return indices and gradients of the places that a gradient is a sum over."""
        node = self.graph.producers[value]
        if node.op == "aten.embedding_dense_backward.default":
            gradient, index, _, padding, _ = node.args
            return [(self._without(node, index.name, padding), gradient.name)]
        if node.op == "aten._embedding_bag_backward.default":
            return [self._of_bags(node)]
        parts = [v for v in self.graph.tensor_inputs(node) if v in self._sources]
        found = [pair for part in parts for pair in self._places(part)]
        if node.op == "aten.add.Tensor":
            return found
        if node.op == ACCUMULATE:
            count = self._sources[value] // self._sources[parts[0]]
            return [self._stacked(node, pair, count) for pair in found]
        return [(index, self._scaled(node, part, node.op, node.args[1:])) for index, part in found]

    def _scaled(self, node: Node, part: str, op: str, rest: tuple[Argument, ...]) -> str:
        kind = self._kind(part)
        return self._add(node, node.name, f"{part}.scaled", op, (Ref(part), *rest), kind)

    def _stacked(self, node: Node, pair: _Places, count: int) -> _Places:
        """Return the places of all micro-batches; gradients are scaled before."""
        index, part = pair
        scale = node.args[1]
        before = replace(node, kwargs={}, tags=())
        if scale != 1:
            part = self._scaled(before, part, "aten.mul.Scalar", (scale,))
        made = []
        for value in (index, part):
            kind = self._kind(value)
            stacked = replace(kind, shape=(count, *kind.shape))
            args = (Ref(value), STACK)
            kwargs = {"shared": True, **node.kwargs}
            name = f"{value}.stack"
            name = self._add(node, node.name, name, ACCUMULATE, args, stacked, **kwargs)
            made.append(name)
        return made[0], made[1]

    def _without(self, node: Node, index: str, padding: int) -> str:
        """Return indices in which the padding row is left out."""
        if padding < 0:
            return index
        kind = self._kind(index)
        mask = f"{index}.is_padding"
        args: tuple[Argument, ...] = (Ref(index), padding)
        bools = replace(kind, dtype="bool")
        mask = self._add(node, node.name, mask, "aten.eq.Scalar", args, bools, shared=True)
        name, args = f"{index}.unpadded", (Ref(index), Ref(mask), -1)
        op = "aten.masked_fill.Scalar"
        return self._add(node, node.name, name, op, args, kind, shared=True)

    def _of_bags(self, node: Node) -> _Places:
        """Return the places of an embedding bag: each has the gradient of its bag."""
        gradient, index, offsets, bag_of, sizes, _, _, _, mode, _, weights, *more = node.args
        count, width = self._kind(index.name).shape[0], self.table.shape[1]
        own = self._kind(offsets.name)

        def add(
            name: str, op: str, args: tuple[Argument, ...], kind: TensorType, **kw: Argument
        ) -> Ref:
            return Ref(self._add(node, node.name, f"{node.name}.{name}", op, args, kind, **kw))

        if self._kind(bag_of.name).shape != (count,):  # a fast kernel leaves it out
            places = replace(own, shape=(count,))
            dtype = {"dtype": Symbol("dtype", own.dtype), "device": Symbol("device", "cpu")}
            at = add("place", "aten.arange.start_step", (0, count, 1), places, **dtype)
            behind = add(
                "behind",
                "aten.searchsorted.Tensor",
                (offsets, at),
                replace(places, dtype="int64"),
                right=True,
            )
            bag_of = add("bag", "aten.sub.Tensor", (behind, 1), replace(places, dtype="int64"))
        rows = replace(self._kind(gradient.name), shape=(count, width))
        part = add("parts", "aten.index_select.default", (gradient, 0, bag_of), rows)
        column = replace(rows, shape=(count, 1))
        if mode == _MEAN:
            size = add(
                "size",
                "aten.index_select.default",
                (sizes, 0, bag_of),
                replace(self._kind(sizes.name), shape=(count,)),
            )
            size = add(
                "size",
                "aten.unsqueeze.default",
                (size, 1),
                replace(self._kind(size.name), shape=(count, 1)),
            )
            part = add("mean", "aten.div.Tensor", (part, size), rows)
        if weights is not None:
            weight = add("weight", "aten.unsqueeze.default", (weights, 1), column)
            part = add("weighted", "aten.mul.Tensor", (part, weight), rows)
        padding = more[0] if more else -1
        return self._without(node, index.name, padding), part.name


def _is_number(argument: Argument) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool)
