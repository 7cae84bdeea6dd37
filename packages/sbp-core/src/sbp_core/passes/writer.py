"""Writing several nodes in place of one: a pass asks a `GraphWriter` for what a call makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph.ir import Argument, LogicalGraph, Node, Ref, Symbol, TensorType, ValueType


class GraphWriter:
    """Collects the nodes of a rewritten graph, and the types of their results.

    Args:
        graph: What is rewritten; its types are known.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = dict(graph.types)
        self._names = {node.name for node in graph.nodes} | set(graph.types)

    def tensor(self, value: str) -> TensorType:
        """Return the type of a tensor, also of one that was written."""
        found = self.types[value]
        assert isinstance(found, TensorType), f"{value} is a host scalar, not a tensor"
        return found

    def call(
        self,
        like: Node,
        op: str,
        args: tuple[Argument, ...],
        made: TensorType,
        *,
        kwargs: Mapping[str, Argument] | None = None,
        pointwise: bool = False,
        label: str = "",
    ) -> Ref:
        """Add a node that runs when, and belongs where, another does.

        Args:
            like: Gives phase, rate, module, source and forward node.
            op: `aten.exp.default`.
            args: In the operator's own order; tensors as `Ref`.
            kwargs: Named ones.
            made: Type of the one tensor that it makes.
            pointwise: Whether ATen tags the operator so.
            label: What the name ends in; the operator if omitted.
        """
        name = self._fresh(f"{like.name}.{label or op.split('.')[1]}")
        self.types[name] = made
        self.nodes.append(
            replace(
                like,
                name=name,
                op=op,
                args=args,
                kwargs=dict(kwargs or {}),
                outputs=(name,),
                tags=tags_like(like, pointwise=pointwise),
            )
        )
        return Ref(name)

    def pointwise(
        self,
        like: Node,
        op: str,
        *args: Argument,
        made: TensorType | None = None,
        **kwargs: Argument,
    ) -> Ref:
        """Add a pointwise call of an operator of ATen, such as `exp.default`; see `call`.

        Args:
            like: See `call`.
            op: Without the namespace.
            *args: In the operator's own order.
            made: Type of what it makes; that of the first argument if omitted.
            **kwargs: Named arguments.
        """
        kind = made or self.tensor(args[0].name)
        return self.call(like, f"aten.{op}", args, kind, kwargs=kwargs, pointwise=True)

    def converted(self, like: Node, value: Ref, dtype: str) -> Ref:
        """Return a value in a dtype: itself if it has that."""
        kind = self.tensor(value.name)
        if kind.dtype == dtype:
            return value
        made = TensorType(kind.shape, dtype)
        return self.pointwise(
            like, "_to_copy.default", value, made=made, dtype=Symbol("dtype", dtype)
        )

    def written(self) -> LogicalGraph:
        """Return the graph of the nodes that were written."""
        return self.graph.with_nodes(tuple(self.nodes), types=self.types)

    def _fresh(self, name: str) -> str:
        count, found = 0, name
        while found in self._names:
            count += 1
            found = f"{name}_{count}"
        self._names.add(found)
        return found

    def rename_last(self, node: Node) -> None:
        """Let the node that was written last make what `node` made, under its name."""
        last = self.nodes[-1]
        assert self.types[last.outputs[0]] == self.types[node.outputs[0]], f"{node.name} changes"
        del self.types[last.outputs[0]]
        self.nodes[-1] = replace(last, name=node.name, outputs=node.outputs)


#: How tags begin that say something of the operator; the others say where a node belongs.
_OF_OPERATOR = ("pointwise", "view", "seeded", "unknown")


def tags_like(node: Node, *, pointwise: bool = False) -> tuple[str, ...]:
    """Return the tags of another operator that belongs where a node does."""
    own = ("pointwise",) if pointwise else ()
    return (*own, *(tag for tag in node.tags if not tag.startswith(_OF_OPERATOR)))
