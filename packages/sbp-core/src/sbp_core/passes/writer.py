"""Writing several nodes in place of one: a pass asks a `GraphWriter` for what a call makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph.ir import Argument, LogicalGraph, Node, Ref, TensorType, ValueType


class GraphWriter:
    """Collects the nodes of a rewritten graph, and the types of what they make.

    Args:
        graph: What is rewritten; its types are known.
    """

    def __init__(self, graph: LogicalGraph) -> None:
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
