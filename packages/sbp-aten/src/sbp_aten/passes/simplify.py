"""Passes that remove work without changing a bit: identities, shared expressions, reshapes.

*Not* removed: `add(x, 0.0)`, which makes 0.0 of -0.0, and copies that make an argument dense: a
later `view` may need it, and sums add in the order in which elements lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sbp_core.graph import LogicalGraph, Node, Ref, Symbol, drop_dead, rename_outputs, rename_uses

#: Floating dtypes -> those that hold each of their numbers.
WIDER: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}

#: Operators whose result may have gaps between its elements, or hold one of them many times.
_GAPS = frozenset(
    {"expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
    | {"diagonal", "unfold", "as_strided"}
)

#: Operators that return a view without gaps.
_DENSE_VIEWS = frozenset(
    {"t", "transpose", "permute", "unsqueeze", "squeeze", "alias", "detach", "view"}
)

_Find = Callable[["_Identities", Node], str | None]


def drop_identities(graph: LogicalGraph) -> LogicalGraph:
    """Remove operators that return their argument, or the argument of their argument.

    before: a = mul(x, 1); b = _to_copy(a, float32); c = neg(b); d = neg(c); y = relu(d)
    after:  y = relu(x)
    """
    return _Identities(graph).run()


class _Identities:
    """Finds identities in one graph: the nodes so far, by the values that they make."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.types = graph.types
        self.made: dict[str, Node] = {}

    def run(self) -> LogicalGraph:
        names: dict[str, str] = {}
        nodes: list[Node] = []
        for old in self.graph.nodes:
            node = rename_uses(old, names)
            find = _FINDERS.get(node.kind) if node.op.startswith("aten.") else None
            same = find(self, node) if find is not None and len(node.outputs) == 1 else None
            # A value of equal elements may replace the output of a node if it lies as densely.
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

    def _without_widening(self, node: Node) -> Node:
        """Return a cast of a cast to a wider dtype as one cast."""
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
        """Whether a node converts to a dtype that holds every number of its argument's."""
        if node.kind != "_to_copy" or not _only_dtype(node):
            return False
        before, after = map(self.graph.tensor, (node.args[0].name, node.outputs[0]))
        return after.dtype in WIDER.get(before.dtype, ())


def may_have_gaps(made: Mapping[str, Node], value: str) -> bool:
    """Whether a value may not be dense, by what it is a look at; `made` has what made values."""
    node = made.get(value)
    while node is not None and node.kind in _DENSE_VIEWS:
        node = made.get(_argument(node) or "")
    return node is not None and node.kind in _GAPS


def _argument(node: Node) -> str | None:
    """Return argument 0 if it is a value of the graph."""
    return node.args[0].name if node.args and isinstance(node.args[0], Ref) else None


def _only_dtype(node: Node) -> bool:
    """Whether a conversion changes the dtype only (a device is the one of all)."""
    return len(node.args) == 1 and set(node.kwargs) <= {"dtype", "device", "layout"}


def _same_type(_: _Identities, node: Node) -> str | None:
    """`alias`, `detach`, `expand` to what it is; whether types agree is tested by the caller."""
    return _argument(node)


def _copy(run: _Identities, node: Node) -> str | None:
    """`clone`, `_to_copy`: to the same dtype, or back from a wider one."""
    if node.kind == "clone" and (len(node.args) > 1 or node.kwargs):
        nodes = node.kwargs.get("memory_format")
        if nodes != Symbol("memory_format", "preserve_format") or len(node.kwargs) > 1:
            return None
    elif node.kind == "_to_copy" and not _only_dtype(node):
        return None
    value = _argument(node)
    source = run.source(node)
    if node.kind == "_to_copy" and source is not None and run.widens(source):
        return _argument(source)
    return value


def _number(node: Node) -> int | float | None:
    """Return the second of two arguments if it is a number that is known."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], bool):
        return None
    return node.args[1] if isinstance(node.args[1], int | float) else None


def _times_one(_: _Identities, node: Node) -> str | None:
    """`mul(x, 1)`, `div(x, 1)`, `pow(x, 1)`."""
    return _argument(node) if _number(node) == 1 else None


def _minus_zero(_: _Identities, node: Node) -> str | None:
    """`sub(x, 0)`: x - 0.0 is x even for x = -0.0."""
    number = _number(node)
    return _argument(node) if number == 0 and str(number) in ("0", "0.0") else None


def _plus_zero(run: _Identities, node: Node) -> str | None:
    """`add(x, 0)` of integers: of floats it would make 0.0 of -0.0."""
    exact = run.graph.tensor(node.outputs[0]).dtype.startswith(("int", "uint"))
    return _argument(node) if exact and _number(node) == 0 else None


def _twice(run: _Identities, node: Node) -> str | None:
    """`neg(neg(x))`, `bitwise_not(bitwise_not(x))`."""
    source = run.source(node)
    return _argument(source) if source is not None and source.op == node.op else None


def _swapped_back(run: _Identities, node: Node) -> str | None:
    """`transpose` of the same two dims."""
    source = run.source(node)
    if source is None or source.op != node.op:
        return None
    rank = len(run.graph.tensor(node.outputs[0]).shape)
    swapped = [{dim % rank for dim in entry.args[1:]} for entry in (node, source)]
    return _argument(source) if swapped[0] == swapped[1] else None


def _permuted_back(run: _Identities, node: Node) -> str | None:
    """`permute` of a `permute` that it undoes, or of nothing at all."""
    rank = len(node.args[1])
    dims = [dim % rank for dim in node.args[1]]
    if dims == list(range(rank)):
        return _argument(node)
    source = run.source(node)
    if source is None or source.op != node.op:
        return None
    inner = [dim % rank for dim in source.args[1]]
    return _argument(source) if [inner[dim] for dim in dims] == list(range(rank)) else None


def _squeezed_back(run: _Identities, node: Node) -> str | None:
    """`squeeze` of the dim that an `unsqueeze` put there, and the other way round."""
    source = run.source(node)
    if source is None or {source.kind, node.kind} != {"squeeze", "unsqueeze"}:
        return None
    wide = max(len(run.graph.tensor(entry.outputs[0]).shape) for entry in (node, source))
    dims = [entry.args[1:] for entry in (node, source)]
    if any(len(entry) != 1 or not isinstance(entry[0], int) for entry in dims):
        return None
    return _argument(source) if dims[0][0] % wide == dims[1][0] % wide else None


def _whole_slice(_: _Identities, node: Node) -> str | None:
    """`slice` of all of a dim; that its type stays says so, unless it goes by another step."""
    return _argument(node) if len(node.args) < 5 or node.args[4] == 1 else None


_FINDERS: Mapping[str, _Find] = {
    name: find
    for names, find in {
        "_to_copy clone": _copy,
        "add": _plus_zero,
        "alias detach expand": _same_type,
        "bitwise_not neg": _twice,
        "div mul pow": _times_one,
        "permute": _permuted_back,
        "slice": _whole_slice,
        "squeeze unsqueeze": _squeezed_back,
        "sub": _minus_zero,
        "transpose": _swapped_back,
    }.items()
    for name in names.split()
}


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


# Shared expressions


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
