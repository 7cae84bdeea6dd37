"""Passes that remove work without changing a bit: shared expressions, transposes, reshapes."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.graph.ir import LogicalGraph, Node, Ref
from sbp_core.graph.rewrite import drop_dead, rename_outputs, rename_uses

_COPYING = "aten.reshape.default"
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", _COPYING)


def fold_views(graph: LogicalGraph) -> LogicalGraph:
    """Undo transposes of transposes, and reshape once instead of twice.

    before: a = t(w); b = t(a); c = view(x, [6]); d = view(c, [2, 3])
    after:  b is w;             d = view(x, [2, 3])
    """
    names: dict[str, str] = {}
    kept: list[Node] = []
    made: dict[str, Node] = {}
    for old in graph.nodes:
        node = rename_uses(old, names)
        source = made.get(node.args[0].name) if _takes_tensor(node) else None
        if node.op == "aten.t.default" and source is not None and source.op == "aten.t.default":
            names[node.outputs[0]] = source.args[0].name
            continue
        if node.op in _RESHAPES:
            if source is not None and source.op in _RESHAPES and source.phase is node.phase:
                # What had to be copied cannot be viewed.
                op = _COPYING if source.op == _COPYING else node.op
                node = replace(node, op=op, args=(source.args[0], *node.args[1:]))
            if graph.types[node.args[0].name] == graph.types[node.outputs[0]]:
                names[node.outputs[0]] = node.args[0].name
                continue
        kept.append(node)
        made |= dict.fromkeys(node.outputs, node)
    return drop_dead(graph.with_nodes(tuple(kept), outputs=rename_outputs(graph.outputs, names)))


def _takes_tensor(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Ref)


def share_expressions(graph: LogicalGraph) -> LogicalGraph:
    """Compute equal expressions of one phase once.

    Operators that draw from PyTorch's random streams are never equal; `sbp.random_*` are, if all
    of seed, step, site, and place are. Nodes that carry other marks, such as those of two calls
    under `torch.utils.checkpoint`, stay apart.

    before: a = t(w); b = t(w); c = mm(x, a); d = mm(y, b)
    after:  a = t(w);           c = mm(x, a); d = mm(y, a)
    """
    names: dict[str, str] = {}
    first: dict[object, Node] = {}
    kept: list[Node] = []
    for old in graph.nodes:
        node = rename_uses(old, names)
        named = sorted(node.kwargs.items())
        key = repr((node.op, node.args, named, node.phase, node.rate, node.tags))
        twin = None if "seeded" in node.tags else first.get(key)
        if twin is None:
            first[key] = node
            kept.append(node)
        else:
            names |= zip(node.outputs, twin.outputs, strict=True)
    return drop_dead(graph.with_nodes(tuple(kept), outputs=rename_outputs(graph.outputs, names)))
