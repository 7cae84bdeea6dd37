"""Where conversions of dtype stand: beside their source, once, and after the sums of gradients.

A conversion is pointwise, so that it may be done on shards: what is sent afterwards has two bytes
an element instead of four. That can only be planned where nothing that a plan would have to undo
stands between a parameter and its conversion, and where one conversion serves all that use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_aten.pass_options import CastPlacement
from sbp_aten.passes.identities import WIDER
from sbp_core.graph import (
    InputKind,
    LogicalGraph,
    Node,
    Phase,
    Ref,
    Symbol,
    drop_dead,
    rename_outputs,
    rename_uses,
)
from sbp_core.passes import Writer

#: Operators that show all elements of their only tensor in another way, and no fewer.
_LOOKS = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze"}
    | {"expand", "alias", "detach"}
)

#: Products that can be made in a wider dtype than their factors have.
_WIDE = {"aten.mm.default": "sbp.mm_as.default", "aten.bmm.default": "sbp.bmm_as.default"}


def place_casts(graph: LogicalGraph, how: CastPlacement | None = None) -> LogicalGraph:
    """Convert to a narrower dtype right where a value is made, and once for all its users.

    before: a = t(w); b = _to_copy(a, bfloat16); y = mm(x, b); z = mm(x, _to_copy(a, bfloat16))
    after:  c = _to_copy(w, bfloat16); b = t(c); y = mm(x, b); z = mm(x, b)

    With `reduce_dtype="float32"`, products that are converted to float32 to become gradients are
    made in it, so that their parts are summed in it:

    before: g = mm(dy, x); G = _to_copy(g, float32)
    after:  G = sbp.mm_as(dy, x, float32)
    """
    how = how or CastPlacement()
    placed = _Placing(graph, how.parameters == "once").run()
    return _widen_products(placed) if how.reduce_dtype == "float32" else placed


@dataclass(frozen=True, slots=True)
class _Narrow:
    """What a narrow value is: conversions of `source`, looked at through `looks` in order."""

    source: str
    dtype: str
    looks: tuple[Node, ...] = ()


class _Placing:
    """The state of one run."""

    def __init__(self, graph: LogicalGraph, once: bool) -> None:
        self.graph, self.once = graph, once
        self.writer = Writer(graph)
        self.made: dict[str, Node] = {}
        self.converted: dict[object, str] = {}
        #: What was made of parameters, which other phases may have to make for themselves.
        self.of_parameters: dict[str, _Narrow] = {}

    def run(self) -> LogicalGraph:
        names: dict[str, str] = {}
        for old in self.graph.nodes:
            node = rename_uses(old, names)
            if _narrows(self.writer, node):
                narrow = self._narrow(node)
                if node.args[0].name != narrow.source or self._is_shared(narrow, node):
                    names[node.outputs[0]] = self._value(narrow, node)
                    continue
                self.converted[self._key(narrow, node)] = node.outputs[0]
            self._keep(rename_uses(node, self._of_this_phase(node)))
        outputs = rename_outputs(self.graph.outputs, names)
        nodes, types = tuple(self.writer.nodes), self.writer.types
        return drop_dead(self.graph.with_nodes(nodes, outputs=outputs, types=types))

    def _keep(self, node: Node) -> None:
        """Write a node as it is, and remember whether it looks at a conversion of a parameter."""
        self.writer.nodes.append(node)
        self.made |= dict.fromkeys(node.outputs, node)
        if _narrows(self.writer, node) and self._is_parameter(node.args[0].name):
            self.of_parameters[node.outputs[0]] = self._narrow(node)
        elif self._is_look(node) and (seen := self.of_parameters.get(node.args[0].name)):
            self.of_parameters[node.outputs[0]] = replace(seen, looks=(*seen.looks, node))

    def _of_this_phase(self, node: Node) -> dict[str, str]:
        """Return, for what a node uses of another phase's conversions, those of its own."""
        found: dict[str, str] = {}
        for value in node.inputs():
            narrow = self.of_parameters.get(value)
            if narrow is not None and not self.once and self.made[value].phase is not node.phase:
                found[value] = self._value(narrow, node)
        return found

    def _narrow(self, node: Node) -> _Narrow:
        """Return what a conversion makes, as one of the value that nothing looks at before."""
        looks: list[Node] = []
        value: str = node.args[0].name
        while (look := self.made.get(value)) is not None and self._is_look(look):
            looks.insert(0, look)
            value = look.args[0].name
        dtype = self.writer.tensor(node.outputs[0]).dtype
        return _Narrow(value, dtype, tuple(looks))

    def _is_parameter(self, value: str) -> bool:
        entry = self.graph.input_kinds.get(value)
        return entry is not None and entry.kind is InputKind.PARAMETER

    def _key(self, narrow: _Narrow, user: Node) -> object:
        """Return what conversions for several users have in common if one serves them all."""
        own = not self.once and self._is_parameter(narrow.source)
        return narrow.source, narrow.dtype, user.rate, user.phase if own else ""

    def _is_shared(self, narrow: _Narrow, user: Node) -> bool:
        return self._key(narrow, user) in self.converted

    def _value(self, narrow: _Narrow, user: Node) -> str:
        """Return a narrow value for a user: made before, or written now."""
        key = self._key(narrow, user)
        if key not in self.converted:
            like = replace(user, args=(Ref(narrow.source),), name=narrow.source)
            self.converted[key] = self._written(
                like, "aten._to_copy.default", narrow.source, narrow.dtype, pointwise=True
            )
        found = self.converted[key]
        for count, look in enumerate(narrow.looks, 1):
            # A look belongs to the phase that uses it: it costs nothing, and keeps nothing alive.
            shown = tuple(repr((entry.op, entry.args[1:])) for entry in narrow.looks[:count])
            key = (*map(str, (narrow.source, narrow.dtype, user.rate, user.phase)), shown)
            if key not in self.converted:
                args = (Ref(found), *look.args[1:])
                like = replace(user, args=args, kwargs=look.kwargs, name=look.name)
                self.converted[key] = self._written(like, look.op, look.outputs[0], narrow.dtype)
            found = self.converted[key]
        return found

    def _is_look(self, node: Node) -> bool:
        return node.kind in _LOOKS and len(node.inputs()) == 1 and len(node.outputs) == 1

    def _written(
        self, like: Node, op: str, shape_of: str, dtype: str, *, pointwise: bool = False
    ) -> str:
        """Write an operator on the arguments of `like`, of the shape of a value."""
        converts = {"dtype": Symbol("dtype", dtype)}
        made = self.writer.call(
            like,
            op,
            like.args,
            replace(self.writer.tensor(shape_of), dtype=dtype),
            kwargs=converts if pointwise else like.kwargs,
            pointwise=pointwise,
            label=dtype,
        )
        self._keep(self.writer.nodes.pop())
        return made.name


def _narrows(writer: Writer, node: Node) -> bool:
    """Whether a node converts to a dtype of fewer bits, and does nothing else."""
    if node.op != "aten._to_copy.default" or set(node.kwargs) - {"dtype", "device", "layout"}:
        return False
    before, after = (writer.tensor(v).dtype for v in (node.args[0].name, node.outputs[0]))
    return before in WIDER.get(after, ())


def _widen_products(graph: LogicalGraph) -> LogicalGraph:
    """Make gradients that are converted to float32 in float32."""
    wide: dict[str, Node] = {}
    results = {out.value for out in graph.outputs}
    for node in graph.nodes:
        product = _product_of(graph, node, results)
        if product is not None:
            wide[node.name] = product
    if not wide:
        return graph
    gone = {product.name for product in wide.values()}
    nodes = [
        _as_product(node, wide[node.name]) if node.name in wide else node
        for node in graph.nodes
        if node.name not in gone
    ]
    return graph.with_nodes(tuple(nodes))


def _product_of(graph: LogicalGraph, node: Node, results: set[str]) -> Node | None:
    """Return the product of which a node only makes a float32 gradient."""
    if node.op != "aten._to_copy.default" or node.phase is not Phase.BACKWARD:
        return None
    if node.kwargs.get("dtype") != Symbol("dtype", "float32"):
        return None
    (value,) = node.inputs()
    product = graph.producers.get(value)
    if product is None or product.op not in _WIDE or product.rate is not node.rate:
        return None
    alone = len(graph.users[value]) == 1 and value not in results
    return product if alone and _is_gradient(graph, node.outputs[0]) else None


def _is_gradient(graph: LogicalGraph, value: str) -> bool:
    """Whether a value goes to the optimizer, looked at in other ways or added to others."""
    for user in graph.users[value]:
        if user.phase is Phase.OPTIMIZER or user.op == "sbp.accumulate":
            return True
        passes = user.kind in _LOOKS or user.op == "aten.add.Tensor"
        if passes and user.phase is Phase.BACKWARD and _is_gradient(graph, user.outputs[0]):
            return True
    return False


def _as_product(node: Node, product: Node) -> Node:
    args = (*product.args, Symbol("dtype", "float32"))
    return replace(product, op=_WIDE[product.op], args=args, name=node.name, outputs=node.outputs)
