"""Base class that builds the graph of one micro-batch from the graph of the whole batch.

It collects nodes and types of the new graph, creates fresh names, and merges equal nodes. It also
records values that are the same in every micro-batch, because they do not depend on the samples.
`PartCalls` implements it; see the docstring of the package for the idea.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sbp_aten.passes.whole_batch.layout import Samples
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, ValueType, map_refs

#: Prefix of the names of operators that draw counted random numbers.
RANDOM = "sbp.random_"


@dataclass(slots=True)
class MicroBatchBuilder(ABC):
    """Builder of the graph of one micro-batch.

    Args:
        graph: A step on the whole batch.
        num_parts: Number of micro-batches, >= 2.
    """

    graph: LogicalGraph
    num_parts: int
    nodes: list[Node] = field(default_factory=list)
    #: Types of the new graph.
    types: dict[str, ValueType] = field(default_factory=dict)
    #: Values of the whole graph that do not depend on the samples.
    same: set[str] = field(default_factory=set)
    #: Operators that take the samples piece by piece -> number of pieces in a micro-batch.
    loops: dict[str, int] = field(default_factory=dict)
    #: Operators that join pieces -> layout of their result.
    joins: dict[str, Samples] = field(default_factory=dict)
    #: Producer of each value of a merged node.
    makers: dict[str, Node] = field(default_factory=dict)
    _written: dict[str, Node] = field(default_factory=dict)
    _standing_for: dict[str, str] = field(default_factory=dict)
    _expressions: dict[str, str] = field(default_factory=dict)
    _first_equal: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    producers: dict[str, Node] = field(init=False)
    whole_types: dict[str, ValueType] = field(init=False)

    def __post_init__(self) -> None:
        # A copy, because `add_constant` adds to it.
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
        """Add a node to the new graph, unchanged."""
        self.nodes.append(node)
        self.types.update(zip(node.outputs, made, strict=True))

    def add_constant(self, node: Node, kind: TensorType) -> None:
        """Add a new node that computes the same in every micro-batch.

        It also becomes a producer in the whole graph, so that its value can be sliced, too.
        """
        (value,) = node.outputs
        self.producers[value] = node
        self.whole_types[value] = kind
        self.copy_node(node)

    def add_merged(self, node: Node, made: Sequence[ValueType]) -> tuple[str, ...]:
        """Add a node under new names, unless an equal node exists; return its outputs."""
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
        """Return the first value that is equal to a value that is the same in every micro-batch."""
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
        """Add a node that computes the same in every micro-batch."""
        if node.op.startswith(RANDOM):
            node = replace(node, kwargs={**node.kwargs, "micro_batches": self.num_parts})
        self.add(node, [self.graph.types[value] for value in node.outputs])
        self.same.update(node.outputs)

    @abstractmethod
    def slice_constant(self, value: str, layout: Samples, *, numbers: bool = False) -> str | None:
        """Return the slice of a constant tensor for a micro-batch; None if slices would differ.

        Args:
            value: A value of the whole graph, the same in every micro-batch.
            layout: Layout of the slices.
            numbers: Whether it is an index of samples, which counts from 0 in each part.
        """
