"""Passes that remove work without changing a bit: shared expressions, transposes, reshapes."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.graph import LogicalGraph, Node, Ref, drop_dead, rename_outputs, rename_uses

_COPYING = "aten.reshape.default"
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", _COPYING)
_STRIDED, _STRIDED_WRITE = "aten.as_strided.default", "aten.as_strided_scatter.default"


def fold_views(graph: LogicalGraph) -> LogicalGraph:
    """Undo transposes of transposes, and reshape once instead of twice.

    A write to strided elements of a storage followed by a read of the same elements is a reshape,
    too. The gradient of a pooled image in channels-last layout is such a pair.

    before: a = t(w); b = t(a); c = view(x, [6]); d = view(c, [2, 3])
    after:  b is w;             d = view(x, [2, 3])
    """
    names: dict[str, str] = {}
    nodes: list[Node] = []
    made: dict[str, Node] = {}
    for old in graph.nodes:
        node = rename_uses(old, names)
        source = made.get(node.args[0].name) if _takes_tensor(node) else None
        if node.op == "aten.t.default" and source is not None and source.op == "aten.t.default":
            names[node.outputs[0]] = source.args[0].name
            continue
        if source is not None and _reads_back(node, source):
            node = replace(node, op="aten.view.default", args=(source.args[1], node.args[1]))
            source = made.get(node.args[0].name)
        if node.op in _RESHAPES:
            if source is not None and source.op in _RESHAPES and source.phase is node.phase:
                # What had to be copied cannot be viewed.
                op = _COPYING if source.op == _COPYING else node.op
                node = replace(node, op=op, args=(source.args[0], *node.args[1:]))
            if graph.types[node.args[0].name] == graph.types[node.outputs[0]]:
                names[node.outputs[0]] = node.args[0].name
                continue
        nodes.append(node)
        made |= dict.fromkeys(node.outputs, node)
    return drop_dead(graph.with_nodes(tuple(nodes), outputs=rename_outputs(graph.outputs, names)))


def _reads_back(node: Node, source: Node) -> bool:
    """Whether a node reads exactly the elements that its source wrote, in the same order."""
    if node.op != _STRIDED or source.op != _STRIDED_WRITE or node.kwargs or source.kwargs:
        return False
    read, written = _strided_region(*node.args[1:]), _strided_region(*source.args[2:])
    if read is None or read != written:
        return False
    reached = 0
    for stride, extent in sorted((stride, extent) for extent, stride in read[0]):
        if stride <= reached:
            return False
        reached += stride * (extent - 1)
    return True


def _strided_region(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int | None = None
) -> tuple[tuple[tuple[int, int], ...], int] | None:
    """Return (extent, stride) of each dim with more than one element, and the first offset."""
    if start is None:  # the offset of the argument, which is not known here
        return None
    pairs = zip(shape, strides, strict=True)
    return tuple((extent, stride) for extent, stride in pairs if extent != 1), start


def _takes_tensor(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Ref)


def share_expressions(graph: LogicalGraph) -> LogicalGraph:
    """Compute equal expressions of one phase once (common subexpression elimination).

    Operators that draw from PyTorch's random streams are never equal; `sbp.random_*` are, if all
    of seed, step, site, and place are. Nodes that carry other marks, such as those of two calls
    under `torch.utils.checkpoint`, stay apart.

    before: a = t(w); b = t(w); c = mm(x, a); d = mm(y, b)
    after:  a = t(w);           c = mm(x, a); d = mm(y, a)
    """
    names: dict[str, str] = {}
    first: dict[object, Node] = {}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = rename_uses(old, names)
        kwargs = sorted(node.kwargs.items())
        key = repr((node.op, node.args, kwargs, node.phase, node.rate, node.tags))
        equal = None if "seeded" in node.tags else first.get(key)
        if equal is None:
            first[key] = node
            nodes.append(node)
        else:
            names |= zip(node.outputs, equal.outputs, strict=True)
    return drop_dead(graph.with_nodes(tuple(nodes), outputs=rename_outputs(graph.outputs, names)))
