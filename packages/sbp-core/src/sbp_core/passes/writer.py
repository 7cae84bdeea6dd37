"""`GraphWriter`: a builder with which graph passes write several nodes in place of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph.ir import Argument, LogicalGraph, Node, Ref, Symbol, TensorType, ValueType


class GraphWriter:
    """Collects the nodes of a rewritten graph, and the types of their results.

    Args:
        graph: The graph that is rewritten; its types are known.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = dict(graph.types)
        self._names = {node.name for node in graph.nodes} | set(graph.types)

    def tensor(self, value: str) -> TensorType:
        """Return the type of a tensor of the graph, or of one that was written."""
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
        """Add a node with the phase, rate and place of another one.

        Args:
            like: The other node: gives phase, rate, module, source and forward node.
            op: `aten.exp.default`.
            args: In the operator's own order; tensors as `Ref`.
            kwargs: Named arguments.
            made: Type of its one result.
            pointwise: Whether ATen tags the operator as pointwise.
            label: The end of the node's name; the operator if omitted.
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
            op: Name without the namespace.
            *args: In the operator's own order.
            made: Type of the result; the type of the first argument if omitted.
            **kwargs: Named arguments.
        """
        kind = made or self.tensor(args[0].name)
        return self.call(like, f"aten.{op}", args, kind, kwargs=kwargs, pointwise=True)

    def converted(self, like: Node, value: Ref, dtype: str) -> Ref:
        """Return a value in a dtype: itself if it already has it."""
        kind = self.tensor(value.name)
        if kind.dtype == dtype:
            return value
        made = TensorType(kind.shape, dtype)
        return self.pointwise(
            like, "_to_copy.default", value, made=made, dtype=Symbol("dtype", dtype)
        )

    def written(self) -> LogicalGraph:
        """Return the graph of the written nodes."""
        return self.graph.with_nodes(tuple(self.nodes), types=self.types)

    def _fresh(self, name: str) -> str:
        count, found = 0, name
        while found in self._names:
            count += 1
            found = f"{name}_{count}"
        self._names.add(found)
        return found

    def rename_last(self, node: Node) -> None:
        """Let the last written node make the result of `node`, under its name."""
        last = self.nodes[-1]
        assert self.types[last.outputs[0]] == self.types[node.outputs[0]], f"{node.name} changes"
        del self.types[last.outputs[0]]
        self.nodes[-1] = replace(last, name=node.name, outputs=node.outputs)


#: Prefixes of tags that describe the operator; other tags say where a node belongs.
_OF_OPERATOR = ("pointwise", "view", "seeded", "unknown")


def tags_like(node: Node, *, pointwise: bool = False) -> tuple[str, ...]:
    """Return the tags for another operator in the place of a node."""
    own = ("pointwise",) if pointwise else ()
    return (*own, *(tag for tag in node.tags if not tag.startswith(_OF_OPERATOR)))
