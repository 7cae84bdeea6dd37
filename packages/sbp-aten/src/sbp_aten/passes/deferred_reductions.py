"""Deferred reductions: keep values partial sums for longer, and reduce them once they are small.

Sharding propagation moves partial values through linear operators and reduces them where that is
cheapest. Two kinds of programs prevent this; this pass rewrites them:

* A Euclidean norm is not linear: the norms of shards do not add up to it. So its argument would
  have to be reduced and gathered. Written as the root of a sum of squares, it is a partial *number*
  until the root is taken; and norms of norms, as in clipping by the global norm, are one sum of
  squares.
* The gradient of a parameter that is used in several places is a sum, added up in every
  micro-batch. If the places are on different stages, every micro-batch sends an addend as large as
  the parameter. If the addends are accumulated separately, they are sent and added once a step:

      micro-batch    1        2        3        step
      before         a + b    a + b    a + b             an addend crosses stages 3 times
      after          a, b     a, b     a, b     A + B    A or B crosses once

The results are the same up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from sbp_aten.passes.losses import computed_in
from sbp_core.errors import GraphError
from sbp_core.graph import (
    Argument,
    InputKind,
    LogicalGraph,
    Node,
    Phase,
    Rate,
    Ref,
    Symbol,
    TensorType,
    ValueType,
    drop_dead,
)

_STACK = "aten.stack.default"


def defer_reductions(graph: LogicalGraph, apart: Sequence[str] = ()) -> LogicalGraph:
    """Keep partial values partial for longer: see `sum_squares` and `accumulate_addends`.

    before: n = vector_norm(stack([vector_norm(a), vector_norm(b)])); G = accumulate(add(c, d))
    after:  n = sqrt(sum(stack([sum(a a), sum(b b)]))); G = add(accumulate(c), accumulate(d))

    Args:
        graph: A training step, before or after the accumulation over micro-batches.
        apart: Patterns of parameters. Each addend of their gradients gets a separate accumulator.
            Name parameters that several stages use. Only after the accumulation.

    Raises:
        GraphError: a pattern matches no parameter.
    """
    return accumulate_addends(sum_squares(graph), apart)


def sum_squares(graph: LogicalGraph) -> LogicalGraph:
    """Write Euclidean norms as roots of sums of squares, and norms of norms as one of them.

    before: n = vector_norm(x, 2)          takes x whole
    after:  n = sqrt(sum(mul(x, x)))       of a split x, a partial sum of one number
    """
    return drop_dead(_Squares(graph).run())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """One norm: its argument, dims and dtype."""

    x: str
    dims: tuple[int, ...] | None
    keeps: bool
    made: str


def _norms(node: Node) -> list[_Norm]:
    """Return the Euclidean norms that a node computes; none if it does something else."""
    args, made = node.args, node.outputs

    def argument(index: int, name: str, default: Argument) -> Argument:
        return args[index] if index < len(args) else node.kwargs.get(name, default)

    known = set(node.kwargs) <= {"ord", "p", "dim", "keepdim"}
    order = argument(1, "p" if node.kind == "norm" else "ord", 2)
    if not known or isinstance(order, bool) or not isinstance(order, int | float) or order != 2:
        return []
    if node.op == "aten._foreach_norm.Scalar":
        pairs = zip(args[0], made, strict=True)
        return [_Norm(x=x.name, dims=None, keeps=False, made=name) for x, name in pairs]
    if node.op == "aten.norm.Scalar":
        return [_Norm(x=args[0].name, dims=None, keeps=False, made=made[0])]
    if node.op in ("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim"):
        dims = argument(2, "dim", None)
        dims = (dims,) if isinstance(dims, int) else dims or None
        keeps = bool(argument(3, "keepdim", False))
        return [_Norm(x=args[0].name, dims=dims, keeps=keeps, made=made[0])]
    return []


@dataclass(slots=True)
class _Squares:
    """Rewrites the norms of one graph; keeps the sum of squares of each norm."""

    graph: LogicalGraph
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, ValueType] = field(default_factory=dict)
    squares: dict[str, str] = field(default_factory=dict)

    def run(self) -> LogicalGraph:
        self.types = dict(self.graph.types)
        for node in self.graph.nodes:
            norms = _norms(node)
            if not norms:
                self.nodes.append(node)
            for norm in norms:
                self._rewrite(node, norm)
        return self.graph.with_nodes(tuple(self.nodes), types=self.types)

    def _rewrite(self, node: Node, norm: _Norm) -> None:
        made = self.graph.tensor(norm.made)
        # Squares of narrow floats overflow or vanish long before the norm does.
        wide = replace(made, dtype=computed_in(made.dtype))
        squared = self._squares_of_norms(node, norm, wide) or self._squared(node, norm, wide)
        total = f"{norm.made}.squares"
        if norm.dims is None and not norm.keeps:
            self._add(node, total, "aten.sum.default", (Ref(squared),), wide)
        else:
            dims = norm.dims or tuple(range(len(self._type(squared).shape)))
            args = (Ref(squared), dims, norm.keeps)
            self._add(node, total, "aten.sum.dim_IntList", args, wide)
        # The norm keeps its name, so that its users need no change.
        self.squares[norm.made] = total
        root = norm.made if wide == made else f"{norm.made}.root"
        self._add(node, root, "aten.sqrt.default", (Ref(total),), wide, pointwise=True)
        if wide != made:
            self._cast(node, norm.made, root, made)

    def _squares_of_norms(self, node: Node, norm: _Norm, wide: TensorType) -> str:
        """Return the stacked squares if the argument is a stack of norms; else `""`."""
        stack = self.graph.producers.get(norm.x)
        if stack is None or stack.op != _STACK or norm.dims is not None:
            return ""
        # (sqrt a)^2 + (sqrt b)^2 = a + b: instead of the inner norms, their sums of squares are
        # stacked. The inner roots lose their last user, and `drop_dead` removes them. Norms that
        # are no such roots, or roots in another dtype, are squared like any other tensor.
        parts = [self.squares.get(ref.name) for ref in stack.args[0]]
        kinds = {self._type(part).dtype for part in parts if part is not None}
        if None in parts or kinds != {wide.dtype}:
            return ""
        name = f"{norm.made}.parts"
        args = (tuple(Ref(str(part)) for part in parts), *stack.args[1:])
        kind = replace(self.graph.tensor(norm.x), dtype=wide.dtype)
        self._add(node, name, _STACK, args, kind)
        return name

    def _squared(self, node: Node, norm: _Norm, wide: TensorType) -> str:
        kind, x = self.graph.tensor(norm.x), norm.x
        if kind.dtype != wide.dtype:
            kind = replace(kind, dtype=wide.dtype)
            x = f"{norm.made}.wide"
            self._cast(node, x, norm.x, kind)
        name = f"{norm.made}.squared"
        self._add(node, name, "aten.mul.Tensor", (Ref(x), Ref(x)), kind, pointwise=True)
        return name

    def _cast(self, node: Node, name: str, source: str, kind: TensorType) -> None:
        kwargs = {"dtype": Symbol("dtype", kind.dtype)}
        self._add(node, name, "aten._to_copy.default", (Ref(source),), kind, kwargs=kwargs)

    def _type(self, value: str) -> TensorType:
        kind = self.types[value]
        assert isinstance(kind, TensorType), f"{value} is a number of the host"
        return kind

    def _add(
        self,
        node: Node,
        name: str,
        op: str,
        args: tuple[Argument, ...],
        kind: TensorType,
        *,
        pointwise: bool = False,
        kwargs: dict[str, Argument] | None = None,
    ) -> None:
        self.types[name] = kind
        # Tags about recomputation also hold for the new node; tags about the operator do not.
        marks = tuple(tag for tag in node.tags if tag.split(":")[0] in ("recompute", "recomputed"))
        self.nodes.append(
            replace(
                node,
                name=name,
                op=op,
                args=args,
                kwargs=kwargs or {},
                outputs=(name,),
                tags=(*(("pointwise",) if pointwise else ()), *marks),
            )
        )


def accumulate_addends(graph: LogicalGraph, apart: Sequence[str]) -> LogicalGraph:
    """Accumulate each addend of some gradients over the micro-batches, and add them afterwards.

    before: g = add(a, b) [micro]; G = sbp.accumulate(g, 1/M)
    after:  A = sbp.accumulate(a, 1/M); B = sbp.accumulate(b, 1/M); G = add(A, B) [step]

    Each addend needs an accumulator. Without micro-batches there is nothing to do.

    Args:
        graph: A training step, after the accumulation over micro-batches.
        apart: Patterns of parameters.

    Raises:
        GraphError: a pattern matches no parameter.
    """
    names = [entry.name for entry in graph.inputs if entry.kind is InputKind.PARAMETER]
    for pattern in apart:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise GraphError(
                f"the pattern {pattern!r} of gradients matches no parameter",
                accepted=", ".join(names[:12]) + ", ..." * (len(names) > 12),
            )
    wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in apart)]
    sums = {
        node.name: node
        for name in wanted
        for node in _accumulations(graph, name)
        if _addends(graph, node.args[0].name)
    }
    nodes: list[Node] = []
    types: dict[str, ValueType] = dict(graph.types)
    for node in graph.nodes:
        if node.name not in sums:
            nodes.append(node)
            continue
        parts, added = _apart(graph, node)
        types |= {part.outputs[0]: graph.types[node.outputs[0]] for part in (*parts, *added)}
        nodes += [*parts, *added]
    return drop_dead(graph.with_nodes(tuple(nodes), types=types))


def _accumulations(graph: LogicalGraph, parameter: str) -> Iterator[Node]:
    """Yield the nodes that accumulate the gradient of a parameter, found from its update."""
    shape = graph.tensor(parameter).shape
    new = graph.new_states.get(parameter)
    todo, seen = [new] if new is not None else [], {parameter}
    while todo:
        value = todo.pop()
        node = graph.producers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        # Go back from the new value, through the optimizer, to the sum over micro-batches. Only
        # values of the parameter's shape can be its gradient; a clipping factor is a number.
        if node.op == "sbp.accumulate":
            if graph.tensor(value).shape == shape:
                yield node
        elif node.rate is not Rate.MICRO:
            todo += [v for v in graph.tensor_inputs(node) if graph.tensor(v).shape == shape]


def _addends(graph: LogicalGraph, value: str) -> tuple[str, ...]:
    """Return the addends of a sum with a single user; none if a value is no such sum."""
    node = graph.producers.get(value)
    if node is None or node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
        return ()
    # A scaled or broadcast addend cannot be accumulated in place of the sum. The sum must have no
    # other reader, because it is no longer computed in each micro-batch.
    kinds = {str(graph.types.get(getattr(ref, "name", ""))) for ref in node.args}
    once = len(graph.users[value]) == 1 and node.phase is Phase.BACKWARD
    if not once or kinds != {str(graph.types[value])}:
        return ()
    return tuple(part for ref in node.args for part in (_addends(graph, ref.name) or (ref.name,)))


def _apart(graph: LogicalGraph, node: Node) -> tuple[list[Node], list[Node]]:
    """Return the accumulations of the addends of an accumulated sum, and their additions."""
    value, scale = node.args[0].name, node.args[1]
    # The accumulations keep the rate micro, each on the stage that makes its addend (`module`,
    # `forward`); only the additions move to the step.
    parts = [
        replace(
            node,
            name=f"{addend}.part",
            outputs=(f"{addend}.part",),
            args=(Ref(addend), scale),
            module=graph.producers[addend].module,
            forward=graph.producers[addend].forward,
        )
        for addend in _addends(graph, value)
    ]
    made: list[Node] = []
    total = parts[0].outputs[0]
    for index, part in enumerate(parts[1:], 1):
        is_last = index == len(parts) - 1
        name = node.outputs[0] if is_last else f"{node.outputs[0]}.{index}"
        made.append(
            replace(
                graph.producers[value],
                name=name,
                outputs=(name,),
                args=(Ref(total), Ref(part.outputs[0])),
                rate=graph.rate_of(node.outputs[0]),
            )
        )
        total = name
    return parts, made
