"""Place dtype casts next to their source, once for all users; sum gradients in float32.

A cast is pointwise, so it may run on shards: afterwards a value is sent with two bytes an element
instead of four. The planner can use that only if the cast reads the parameter itself, not a view of
it, and if one cast serves all users:

    captured    w --t--> a --cast--> b1      views come before casts, and each user has a separate
                         a --cast--> b2      cast: w is gathered in float32
    placed      w --cast--> c --t--> b       the shard of w is cast, c is gathered in bfloat16

Casts of gradients of parameters to float32 move into the product that makes them, so that partial
sums are added in float32. If several products use an activation, the casts of its gradients move
behind the addition, so that tensor parallelism sends one sum of two bytes an element:

    captured    G --cast--> g, H --cast--> h, s = add(g, h)
    placed      add(G, H) --cast--> s
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp_aten.pass_options import CastPlacement
from sbp_aten.passes.simplify import WIDER
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
from sbp_core.passes import GraphWriter

#: Views of all elements of their only tensor argument. Other views (`OperatorTraits.views`) are
#: left out: a cast moved before a `slice` would convert elements that nothing reads.
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze"}
    | {"expand", "alias", "detach"}
)

#: Products that can be computed in a wider dtype than their factors have.
_WIDE_PRODUCT = {"aten.mm.default": "sbp.mm_as.default", "aten.bmm.default": "sbp.bmm_as.default"}


def place_casts(graph: LogicalGraph, how: CastPlacement | None = None) -> LogicalGraph:
    """Move casts to a narrower dtype next to the value's source, and share them between users.

    before: a = t(w); b = _to_copy(a, bfloat16); y = mm(x, b); z = mm(x, _to_copy(a, bfloat16))
    after:  c = _to_copy(w, bfloat16); b = t(c); y = mm(x, b); z = mm(x, b)

    With `reduce_dtype="float32"`, products that are converted to float32 gradients are computed in
    float32, so that their partial sums are added in it:

    before: g = mm(dy, x); G = _to_copy(g, float32)
    after:  G = sbp.mm_as(dy, x, float32)

    With `add_dtype="as_made"`, gradients of one activation are added before they are cast:

    before: s = add(_to_copy(g, float32), _to_copy(h, float32))
    after:  s = _to_copy(add(g, h), float32)
    """
    how = how or CastPlacement()
    placed = _CastPlacer(graph, how.parameters == "once").run()
    if how.reduce_dtype == "float32":
        placed = _widen_products(placed)
    return _add_as_made(placed) if how.add_dtype == "as_made" else placed


@dataclass(frozen=True, slots=True)
class _NarrowedValue:
    """A value in a narrower dtype: `source`, cast, then seen through `views` in order."""

    source: str
    dtype: str
    views: tuple[Node, ...] = ()


class _CastPlacer:
    """Places the casts of one graph."""

    def __init__(self, graph: LogicalGraph, shared_by_phases: bool) -> None:
        self.graph, self.shared_by_phases = graph, shared_by_phases
        self.writer = GraphWriter(graph)
        self.made: dict[str, Node] = {}
        self.converted: dict[object, str] = {}
        #: Casts of parameters, and views of these. Unless one cast serves the whole step, each
        #: phase has a separate one, so that no gathered copy lives from forward to backward.
        self.of_parameters: dict[str, _NarrowedValue] = {}

    def run(self) -> LogicalGraph:
        names: dict[str, str] = {}
        for old in self.graph.nodes:
            node = rename_uses(old, names)
            if _is_narrowing(self.writer, node):
                narrow = self._trace_cast(node)
                key = self._key(narrow, node)
                if node.args[0].name != narrow.source or key in self.converted:
                    names[node.outputs[0]] = self._materialize(narrow, node)
                    continue
                self.converted[key] = node.outputs[0]
            # A node that uses a cast parameter of another phase gets the cast of its own phase.
            own = {
                value: self._materialize(self.of_parameters[value], node)
                for value in node.inputs()
                if value in self.of_parameters
                and not self.shared_by_phases
                and self.made[value].phase is not node.phase
            }
            self._write(rename_uses(node, own))
        outputs = rename_outputs(self.graph.outputs, names)
        nodes, types = tuple(self.writer.nodes), self.writer.types
        return drop_dead(self.graph.with_nodes(nodes, outputs=outputs, types=types))

    def _write(self, node: Node) -> None:
        """Write a node unchanged, and remember if it is a cast parameter or a view of one."""
        self.writer.nodes.append(node)
        self.made |= dict.fromkeys(node.outputs, node)
        if _is_narrowing(self.writer, node) and self._is_parameter(node.args[0].name):
            self.of_parameters[node.outputs[0]] = self._trace_cast(node)
        elif self._is_view(node) and (seen := self.of_parameters.get(node.args[0].name)):
            self.of_parameters[node.outputs[0]] = replace(seen, views=(*seen.views, node))

    def _trace_cast(self, node: Node) -> _NarrowedValue:
        """Return the result of a cast, with the views before the cast moved after it."""
        views: list[Node] = []
        value: str = node.args[0].name
        while (view := self.made.get(value)) is not None and self._is_view(view):
            views.insert(0, view)
            value = view.args[0].name
        dtype = self.writer.tensor(node.outputs[0]).dtype
        return _NarrowedValue(value, dtype, tuple(views))

    def _is_parameter(self, value: str) -> bool:
        entry = self.graph.input_kinds.get(value)
        return entry is not None and entry.kind is InputKind.PARAMETER

    def _key(self, narrow: _NarrowedValue, user: Node) -> object:
        """Return the key under which users share one cast."""
        per_phase = not self.shared_by_phases and self._is_parameter(narrow.source)
        return narrow.source, narrow.dtype, user.rate, user.phase if per_phase else ""

    def _materialize(self, narrow: _NarrowedValue, user: Node) -> str:
        """Return the name of a narrow value for a user; writes its cast and views if needed."""
        key = self._key(narrow, user)
        if key not in self.converted:
            like = replace(user, args=(Ref(narrow.source),), name=narrow.source)
            self.converted[key] = self._emit(
                like, "aten._to_copy.default", narrow.source, narrow.dtype, pointwise=True
            )
        found = self.converted[key]
        for count, view in enumerate(narrow.views, 1):
            # A view belongs to the phase that uses it: it costs nothing, and keeps nothing alive.
            path = tuple(repr((entry.op, entry.args[1:])) for entry in narrow.views[:count])
            key = (*map(str, (narrow.source, narrow.dtype, user.rate, user.phase)), path)
            if key not in self.converted:
                args = (Ref(found), *view.args[1:])
                like = replace(user, args=args, kwargs=view.kwargs, name=view.name)
                self.converted[key] = self._emit(like, view.op, view.outputs[0], narrow.dtype)
            found = self.converted[key]
        return found

    def _is_view(self, node: Node) -> bool:
        return node.kind in _VIEWS and len(node.inputs()) == 1 and len(node.outputs) == 1

    def _emit(
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
        self._write(self.writer.nodes.pop())
        return made.name


def _is_narrowing(writer: GraphWriter, node: Node) -> bool:
    """Whether a node only casts, to a dtype of fewer bits."""
    dtypes = _cast_dtypes(writer, node)
    return dtypes is not None and dtypes[0] in WIDER.get(dtypes[1], ())


def _cast_dtypes(graph: LogicalGraph | GraphWriter, node: Node) -> tuple[str, str] | None:
    """Return the dtypes before and after a node that only casts; None for any other."""
    if node.op != "aten._to_copy.default" or set(node.kwargs) - {"dtype", "device", "layout"}:
        return None
    return graph.tensor(node.args[0].name).dtype, graph.tensor(node.outputs[0]).dtype


def _widen_products(graph: LogicalGraph) -> LogicalGraph:
    """Compute products in float32 if their only use is a cast to a float32 gradient."""
    float32 = Symbol("dtype", "float32")
    results = {out.value for out in graph.outputs}
    wide: dict[str, Node] = {}
    for node in graph.nodes:
        if (
            node.op != "aten._to_copy.default"
            or node.phase is not Phase.BACKWARD
            or node.kwargs.get("dtype") != float32
        ):
            continue
        (value,) = node.inputs()
        product = graph.producers.get(value)
        if (
            product is not None
            and product.op in _WIDE_PRODUCT
            and product.rate is node.rate
            and len(graph.users[value]) == 1
            and value not in results
            and _is_gradient(graph, node.outputs[0])
        ):
            wide[node.name] = product
    if not wide:
        return graph
    replaced = {product.name for product in wide.values()}
    nodes = []
    for node in graph.nodes:
        if product := wide.get(node.name):
            args, op = (*product.args, float32), _WIDE_PRODUCT[product.op]
            node = replace(product, op=op, args=args, name=node.name, outputs=node.outputs)
        if node.name not in replaced:
            nodes.append(node)
    return graph.with_nodes(tuple(nodes))


def _add_as_made(graph: LogicalGraph) -> LogicalGraph:
    """Add gradients of an activation before they are cast to a wider dtype."""
    writer = GraphWriter(graph)
    for node in graph.nodes:
        terms = [(term, _widening_cast(graph, term)) for term in _terms(graph, node)]
        casts = [cast for _, cast in terms if cast is not None]
        kinds = {graph.tensor(cast.args[0].name) for cast in casts}
        if len(casts) < 2 or len(kinds) > 1:
            writer.nodes.append(node)
            continue
        added: Ref = casts[0].args[0]
        for cast in casts[1:]:
            added = writer.call(node, node.op, (added, cast.args[0]), *kinds, pointwise=True)
        wide = [Ref(term) for term, cast in terms if cast is None]
        if not wide:
            node = replace(casts[0], name=node.name, args=(added,), outputs=node.outputs)
            writer.nodes.append(node)
            continue
        result, how = graph.tensor(node.outputs[0]), casts[0].kwargs
        total = writer.call(casts[0], casts[0].op, (added,), result, kwargs=how, pointwise=True)
        for ref in wide[:-1]:
            total = writer.call(node, node.op, (ref, total), result, pointwise=True)
        writer.nodes.append(replace(node, args=(wide[-1], total)))
    return drop_dead(graph.with_nodes(tuple(writer.nodes), types=writer.types))


def _terms(graph: LogicalGraph, node: Node) -> list[str]:
    """Return the values that a node and those before it add up to the gradient of an activation.

    Empty if the node adds no such gradients, or if another node adds to its result.
    """
    if not _adds_gradients(graph, node) or any(
        _adds_gradients(graph, user) and len(graph.users[node.outputs[0]]) == 1
        for user in graph.users[node.outputs[0]]
    ):
        return []
    terms = list(node.inputs())
    at = 0
    while at < len(terms):
        made = graph.producers.get(terms[at])
        if made is not None and len(graph.users[terms[at]]) == 1 and _adds_gradients(graph, made):
            terms[at : at + 1] = made.inputs()
        else:
            at += 1
    return terms


def _adds_gradients(graph: LogicalGraph, node: Node) -> bool:
    """Whether a node adds two tensors of equal shape to the gradient of an activation."""
    if node.op != "aten.add.Tensor" or node.phase is not Phase.BACKWARD or node.kwargs:
        return False
    made = graph.tensor(node.outputs[0])
    refs = [argument for argument in node.args if isinstance(argument, Ref)]
    return (
        len(refs) == 2
        and all(graph.tensor(ref.name) == made for ref in refs)
        and not _is_gradient(graph, node.outputs[0])
    )


def _widening_cast(graph: LogicalGraph, value: str) -> Node | None:
    """Return the cast that makes a gradient which is used once; None for any other value.

    Only products of bfloat16 count: they round what they sum anyway, and their sum has the range of
    float32. A sum of float16 could overflow, and one of other operators could cancel.
    """
    cast = graph.producers.get(value)
    if cast is None or cast.phase is not Phase.BACKWARD or len(graph.users[value]) > 1:
        return None
    if _cast_dtypes(graph, cast) != ("bfloat16", "float32"):
        return None
    made = graph.producers.get(cast.args[0].name)
    while made is not None and made.kind in _VIEWS:
        made = graph.producers.get(made.args[0].name)
    return cast if made is not None and made.op in _WIDE_PRODUCT else None


def _is_gradient(graph: LogicalGraph, value: str) -> bool:
    """Whether a value reaches the optimizer through views and additions only."""
    for user in graph.users[value]:
        if user.phase is Phase.OPTIMIZER or user.op == "sbp.accumulate":
            return True
        passes = user.kind in _VIEWS or user.op == "aten.add.Tensor"
        if passes and user.phase is Phase.BACKWARD and _is_gradient(graph, user.outputs[0]):
            return True
    return False
