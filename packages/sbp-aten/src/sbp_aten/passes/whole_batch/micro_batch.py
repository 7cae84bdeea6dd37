"""One micro-batch that is written: its nodes, and what of the whole graph is the same in all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sbp_aten.passes.whole_batch.layout import Samples
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, ValueType, map_refs

#: How the names of operators begin that draw counted random numbers.
RANDOM = "sbp.random_"


@dataclass(slots=True)
class MicroBatchBuilder(ABC):
    """What is written of one micro-batch, and what is known of it.

    Args:
        graph: A step on the whole batch.
        num_parts: Micro-batches, >= 2.
    """

    graph: LogicalGraph
    num_parts: int
    nodes: list[Node] = field(default_factory=list)
    #: Of what is written.
    types: dict[str, ValueType] = field(default_factory=dict)
    #: Values of the whole graph that are the same in every micro-batch.
    same: set[str] = field(default_factory=set)
    #: Calls of the whole graph that take pieces of samples: how many a micro-batch has.
    loops: dict[str, int] = field(default_factory=dict)
    #: Those that join pieces, and what they make.
    joins: dict[str, Samples] = field(default_factory=dict)
    #: What makes each value that is written once for all of its equals.
    makers: dict[str, Node] = field(default_factory=dict)
    _written: dict[str, Node] = field(default_factory=dict)
    _standing_for: dict[str, str] = field(default_factory=dict)
    _expressions: dict[str, str] = field(default_factory=dict)
    _first_equal: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    producers: dict[str, Node] = field(init=False)
    whole_types: dict[str, ValueType] = field(init=False)

    def __post_init__(self) -> None:
        # A copy of its own: `add_constant` adds to what it knows.
        self.whole_types = dict(self.graph.types)
        self.graph = replace(self.graph, types=self.whole_types)
        self.producers = dict(self.graph.producers)
        self.graph.__dict__["producers"] = self.producers  # the cached property
        self._taken = {node.name for node in self.graph.nodes} | set(self.graph.types)

    def fresh(self, name: str) -> str:
        """Return a name that nothing else has."""
        count, found = 0, name
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

    def add(self, node: Node, made: Sequence[ValueType]) -> None:
        """Write a node as it is."""
        self.nodes.append(node)
        self.types.update(zip(node.outputs, made, strict=True))

    def add_constant(self, node: Node, kind: TensorType) -> None:
        """Write a node that the whole graph does not have, and does the same in every micro-batch.

        The whole graph knows it from now on, so that what it makes is cut where it meets samples.
        """
        (value,) = node.outputs
        self.producers[value] = node
        self.whole_types[value] = kind
        self.copy_node(node)

    def add_merged(self, node: Node, made: Sequence[ValueType]) -> tuple[str, ...]:
        """Write a node under new names, unless an equal one is written; return what it makes."""
        key = repr((node.op, node.args, sorted(node.kwargs.items()), node.phase))
        if key not in self._written:
            written = replace(
                node,
                name=self.fresh(f"{node.name}.piece"),
                outputs=tuple(self.fresh(f"{value}.piece") for value in node.outputs),
                forward=self._standing_for.get(node.forward, node.forward),
            )
            self._written[key] = written
            self.makers |= dict.fromkeys(written.outputs, written)
            self.add(written, made)
        self._standing_for[node.name] = self._written[key].name
        return self._written[key].outputs

    def first_equal(self, value: str) -> str:
        """Return the first of all values, the same in every micro-batch, that are equal to one."""
        if value not in self._first_equal:
            node = self.graph.producers.get(value)
            if node is None:
                return value

            def change(ref: Ref) -> Argument:
                return Ref(self.first_equal(ref.name)) if ref.name in self.same else ref

            kwargs = sorted((key, map_refs(one, change)) for key, one in node.kwargs.items())
            at = node.outputs.index(value)
            key = repr((node.op, map_refs(node.args, change), kwargs, node.phase, at))
            self._first_equal[value] = self._expressions.setdefault(key, value)
        return self._first_equal[value]

    def copy_node(self, node: Node) -> None:
        """Write a node that does the same in every micro-batch."""
        if node.op.startswith(RANDOM):
            node = replace(node, kwargs={**node.kwargs, "micro_batches": self.num_parts})
        self.add(node, [self.graph.types[value] for value in node.outputs])
        self.same.update(node.outputs)

    @abstractmethod
    def slice_constant(self, value: str, layout: Samples, *, numbers: bool = False) -> str | None:
        """Return a part of a tensor that is made of numbers alone; None if parts would differ.

        Args:
            value: Of the whole graph, the same in every micro-batch.
            layout: What it is cut to.
            numbers: Whether it is an index of the samples, which in a part are its own.
        """
