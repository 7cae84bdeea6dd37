"""Passes that remove work without changing a bit: identities, shared expressions, reshapes.

They do *not* remove `add(x, 0.0)`, which makes 0.0 of -0.0, or copies that make an argument dense:
a later `view` may need it, and sums add in the order of elements in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbp_core.graph import LogicalGraph, Node, Ref, Symbol, drop_dead, rename_outputs, rename_uses

#: Floating dtype -> the dtypes that represent all its numbers.
WIDER: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}

#: Operators whose result may have gaps between its elements in memory, or repeat one.
_GAPS = frozenset(
    {"expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
    | {"diagonal", "unfold", "as_strided"}
)

#: Operators that return a view without gaps.
_DENSE_VIEWS = frozenset(
    {"t", "transpose", "permute", "unsqueeze", "squeeze", "alias", "detach", "view"}
)


def drop_identities(graph: LogicalGraph) -> LogicalGraph:
    """Remove operators that return their argument, or the argument of their argument.

    before: a = mul(x, 1); b = _to_copy(a, float32); c = neg(b); d = neg(c); y = relu(d)
    after:  y = relu(x)
    """
    return _Identities(graph).run()


class _Identities:
    """Removes the identities of one graph; keeps the nodes so far by their outputs."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.types = graph.types
        self.made: dict[str, Node] = {}

    def run(self) -> LogicalGraph:
        names: dict[str, str] = {}
        nodes: list[Node] = []
        for old in self.graph.nodes:
            node = rename_uses(old, names)
            known = node.op.startswith("aten.") and len(node.outputs) == 1
            same = self._same(node) if known else None
            # An equal value may replace the output of a node if it is as dense in memory.
            if (
                same is not None
                and self.types[same] == self.types[node.outputs[0]]
                and (node.kind in _DENSE_VIEWS | _GAPS or not may_have_gaps(self.made, same))
            ):
                names[node.outputs[0]] = same
                continue
            node = self._without_widening(node)
            nodes.append(node)
            self.made |= dict.fromkeys(node.outputs, node)
        outputs = rename_outputs(self.graph.outputs, names)
        return drop_dead(self.graph.with_nodes(tuple(nodes), outputs=outputs))

    def _same(self, node: Node) -> str | None:
        """Return the value that a node returns unchanged; None if it is no identity."""
        value, source, number = _argument(node), self.source(node), _number(node)
        #: The argument of the same operator applied before.
        twice = _argument(source) if source is not None and source.op == node.op else None
        match node.kind:
            case "alias" | "detach" | "expand":
                return value
            case "mul" | "div" | "pow":
                return value if number == 1 else None
            case "sub":  # x - 0.0 is x even for x = -0.0
                return value if number == 0 and str(number) in ("0", "0.0") else None
            case "add":  # integers only: for floats it would make 0.0 of -0.0
                exact = self.graph.tensor(node.outputs[0]).dtype.startswith(("int", "uint"))
                return value if exact and number == 0 else None
            case "neg" | "bitwise_not":
                return twice
            case "slice":  # the whole dim, if the type is unchanged and the step is 1
                return value if len(node.args) < 5 or node.args[4] == 1 else None
            case "transpose" if twice and source:
                rank = len(self.graph.tensor(node.outputs[0]).shape)
                mine, earlier = ({dim % rank for dim in one.args[1:]} for one in (node, source))
                return twice if mine == earlier else None
            case "permute":
                rank = len(node.args[1])
                dims = [dim % rank for dim in node.args[1]]
                if dims == list(range(rank)):
                    return value
                inner = [dim % rank for dim in source.args[1]] if twice and source else []
                undone = [inner[dim] for dim in dims] if inner else []
                return twice if undone == list(range(rank)) else None
            case "squeeze" | "unsqueeze" if source is not None:
                return self._squeezed_back(node, source)
            case "clone" | "_to_copy":
                return self._copied(node, source)
        return None

    def _squeezed_back(self, node: Node, source: Node) -> str | None:
        """`squeeze` of the dim that an `unsqueeze` put there, and the other way round."""
        if {source.kind, node.kind} != {"squeeze", "unsqueeze"}:
            return None
        wide = max(len(self.graph.tensor(entry.outputs[0]).shape) for entry in (node, source))
        dims = [entry.args[1:] for entry in (node, source)]
        if any(len(entry) != 1 or not isinstance(entry[0], int) for entry in dims):
            return None
        return _argument(source) if dims[0][0] % wide == dims[1][0] % wide else None

    def _copied(self, node: Node, source: Node | None) -> str | None:
        """`clone`, `_to_copy`: to the same dtype, or back from a wider one."""
        if node.kind == "_to_copy":
            if not _only_dtype(node):
                return None
            return _argument(source if source is not None and self.widens(source) else node)
        preserved = node.kwargs == {"memory_format": Symbol("memory_format", "preserve_format")}
        return _argument(node) if preserved or (len(node.args) == 1 and not node.kwargs) else None

    def _without_widening(self, node: Node) -> Node:
        """Merge a cast to a wider dtype and the cast after it into one."""
        source = self.source(node)
        if node.kind != "_to_copy" or not _only_dtype(node):
            return node
        floating = self.graph.tensor(node.outputs[0]).dtype.startswith(("float", "bfloat"))
        wide = source is not None and self.widens(source)
        return replace(node, args=source.args) if source and wide and floating else node

    def source(self, node: Node) -> Node | None:
        """Return the node that makes argument 0."""
        return self.made.get(_argument(node) or "")

    def widens(self, node: Node) -> bool:
        """Whether a node casts to a dtype that represents all numbers of the argument's dtype."""
        if node.kind != "_to_copy" or not _only_dtype(node):
            return False
        before, after = map(self.graph.tensor, (node.args[0].name, node.outputs[0]))
        return after.dtype in WIDER.get(before.dtype, ())


def may_have_gaps(made: Mapping[str, Node], value: str) -> bool:
    """Whether a value may have gaps in memory, by its views; `made`: value -> its node."""
    node = made.get(value)
    while node is not None and node.kind in _DENSE_VIEWS:
        node = made.get(_argument(node) or "")
    return node is not None and node.kind in _GAPS


def _argument(node: Node) -> str | None:
    """Return argument 0 if it is a value of the graph."""
    return node.args[0].name if node.args and isinstance(node.args[0], Ref) else None


def _only_dtype(node: Node) -> bool:
    """Whether a conversion changes only the dtype (all values have one device)."""
    return len(node.args) == 1 and set(node.kwargs) <= {"dtype", "device", "layout"}


def _number(node: Node) -> int | float | None:
    """Return the second of two arguments if it is a literal number."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], bool):
        return None
    return node.args[1] if isinstance(node.args[1], int | float) else None


# Reshapes

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
        source = made.get(_argument(node) or "")
        if node.op == "aten.t.default" and source is not None and source.op == "aten.t.default":
            names[node.outputs[0]] = source.args[0].name
            continue
        if source is not None and _reads_back(node, source):
            node = replace(node, op="aten.view.default", args=(source.args[1], node.args[1]))
            source = made.get(node.args[0].name)
        if node.op in _RESHAPES:
            if source is not None and source.op in _RESHAPES and source.phase is node.phase:
                # If the first reshape had to copy, the merged one has to, too.
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
    if start is None:  # the offset of the argument, which is unknown here
        return None
    pairs = zip(shape, strides, strict=True)
    return tuple((extent, stride) for extent, stride in pairs if extent != 1), start


# Shared expressions


def share_expressions(graph: LogicalGraph) -> LogicalGraph:
    """Compute equal expressions of one phase once (common subexpression elimination).

    Operators that draw from PyTorch's random streams are never equal; `sbp.random_*` are, if seed,
    step, site, and place are equal. Nodes with different tags, such as nodes of two calls under
    `torch.utils.checkpoint`, are not merged.

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
