"""Basic edits of graphs for passes: rename used values, drop dead nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sbp_core.graph.ir import Argument, GraphOutput, LogicalGraph, Node, Ref, map_refs


def rename_uses(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node with every used value replaced by `names[value]`, if there is an entry."""
    if not any(value in names for value in node.inputs()):
        return node

    def change(ref: Ref) -> Argument:
        return Ref(names.get(ref.name, ref.name))

    return replace(
        node,
        args=map_refs(node.args, change),
        kwargs={key: map_refs(value, change) for key, value in node.kwargs.items()},
    )


def rename_outputs(
    outputs: Iterable[GraphOutput], names: Mapping[str, str]
) -> tuple[GraphOutput, ...]:
    """Return graph outputs with replaced values."""
    return tuple(replace(out, value=names.get(out.value, out.value)) for out in outputs)


def drop_dead(graph: LogicalGraph) -> LogicalGraph:
    """Remove nodes none of whose outputs is used.

    before: a = mm(x, w); b = t(a); output a
    after:  a = mm(x, w); output a
    """
    live = {out.value for out in graph.outputs}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if any(value in live for value in node.outputs):
            kept.append(node)
            live.update(node.inputs())
    return graph.with_nodes(tuple(reversed(kept)))
