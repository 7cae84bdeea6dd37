"""Operator slicing: run an operator with a large parameter as several operators on slices of it.

A sharded parameter is gathered slice by slice, used, and freed, so only 1/count of it is whole at
once. Likewise its gradient is computed and reduced slice by slice. Slice j of a dim consists of its
elements j, j + count, ...: each rank holds an equal share of each slice, along whichever dim the
parameter is sharded, so a slice is sent at its own size and the bytes of a step are unchanged.
Slices run one after the other: each waits for the result of the one before (`sbp.piece(x, token,
...)`). They are tagged `slice:COUNT`, so that sharding propagation decides alike for a slice and
for the whole.

The sliced dim of the parameter follows from the operator:

    along        forward y = x W       backward dx = dy W'     gradient dW = x' dy
    output       columns of y          columns of dx           rows of dW
    contraction  addends of y          addends of dx           rows of dW

Slices along outputs give the same elements, joined by a copy. Slices along the contraction are
added in another order, and need no copy.

Source: Jiang et al., "OSDP: Optimal sharded data parallel for distributed deep learning", IJCAI
2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sbp_aten.pass_options import Slicing
from sbp_core.errors import ConfigError
from sbp_core.graph import (
    Argument,
    InputKind,
    LogicalGraph,
    Node,
    Phase,
    Ref,
    TensorType,
    ValueType,
    drop_dead,
)
from sbp_core.graph_variant import SliceAlong

#: Contractions: the positions of both factors, and of the bias (-1: none).
_CONTRACTIONS = {
    "aten.mm.default": (0, 1, -1),
    "aten.addmm.default": (1, 2, 0),
    "aten.bmm.default": (0, 1, -1),
    "aten.baddbmm.default": (1, 2, 0),
    "sbp.mm_as.default": (0, 1, -1),
    "sbp.bmm_as.default": (0, 1, -1),
}

#: Contractions whose addends can be summed without loss.
_SUMMABLE = frozenset(op for op in _CONTRACTIONS if op.startswith("aten."))

#: Number of dims of the factors -> operator that adds their product to a sum.
_ADDING = {2: "aten.addmm.default", 3: "aten.baddbmm.default"}

#: Views and casts that can be applied to a slice like to the whole.
_ARRANGING = frozenset(
    {"aten.t.default", "aten.transpose.int", "aten.permute.default", "aten._to_copy.default"}
)

_EMBEDDING, _EMBEDDING_BACKWARD = (
    "aten.embedding.default",
    "aten.embedding_dense_backward.default",
)


def slice_operators(graph: LogicalGraph, slices: Mapping[str, Slicing]) -> LogicalGraph:
    """Run the operators of some parameters, and of their gradients, in slices.

    before: y = mm(x, t(w))
    after:  w/0 = sbp.piece(w, x, 0, 0, 2); y/0 = mm(x, t(w/0))
            w/1 = sbp.piece(w, y/0, 0, 1, 2); y/1 = mm(x, t(w/1)); y = view(stack([y/0, y/1], 1))

    Args:
        graph: A captured step.
        slices: Pattern of parameters or of modules -> slicing. Later patterns override earlier
            ones.

    Raises:
        ConfigError: a pattern matches no parameter whose operators can be sliced, or a dim does not
            have that many equal parts.
    """
    chosen = _chosen(graph, slices)
    for name, how in chosen.items():
        graph = _Slicer(graph, name, how).run()
    return drop_dead(graph)


def _chosen(graph: LogicalGraph, slices: Mapping[str, Slicing]) -> dict[str, Slicing]:
    """Return the slicing of each parameter that a pattern matches and that can be sliced."""
    names = [
        entry.name
        for entry in graph.inputs
        if entry.kind is InputKind.PARAMETER
        and any(use.node.phase is Phase.FORWARD for use in _uses(graph, entry.name))
    ]
    chosen: dict[str, Slicing] = {}
    for pattern, how in slices.items():
        found = [
            name
            for name in names
            if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
        ]
        if not found:
            raise ConfigError(
                f"the pattern {pattern!r} of slices matches no parameter that can be sliced",
                accepted=", ".join(names[:12]) + ", ..." * (len(names) > 12),
                todo=f"name matrices that go into {', '.join([*_CONTRACTIONS, _EMBEDDING])}",
            )
        chosen |= dict.fromkeys(found, how)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """An operator that uses a parameter.

    Args:
        node: The operator.
        position: Position of the parameter among the arguments.
        chain: The views and casts between parameter and operator, in order.
    """

    node: Node
    position: int
    chain: tuple[Node, ...]


def _uses(graph: LogicalGraph, value: str, chain: tuple[Node, ...] = ()) -> Iterator[_Use]:
    """Yield the operators of forward and backward that can be sliced along a value."""
    for user in graph.users[value]:
        if user.phase is Phase.OPTIMIZER:
            continue
        if user.op in _ARRANGING:
            yield from _uses(graph, user.outputs[0], (*chain, user))
        left, right, _ = _CONTRACTIONS.get(user.op, (-1, -1, -1))
        looks_up = user.op == _EMBEDDING and not chain and len(user.args) < 5
        for position in (left, right, 0 if looks_up else -1):
            plain = not user.kwargs and user.inputs().count(value) == 1
            if position >= 0 and user.args[position] == Ref(value) and plain:
                yield _Use(node=user, position=position, chain=chain)


class _Slicer:
    """The slicing of the operators of one parameter."""

    def __init__(self, graph: LogicalGraph, name: str, how: Slicing) -> None:
        self.graph, self.name, self.how = graph, name, how
        self.types: dict[str, ValueType] = dict(graph.types)
        self.taken = {*graph.types, *graph.by_name}
        self.made: list[Node] = []

    def run(self) -> LogicalGraph:
        """Return the graph with slices.

        Raises:
            ConfigError: an operator cannot be sliced.
        """
        uses = {use.node.name: use for use in _uses(self.graph, self.name)}
        shape = sorted(self.graph.tensor(self.name).shape)
        # Nodes that compute the gradient of the parameter.
        gradients = {
            node.name
            for node in self.graph.nodes
            if node.phase is Phase.BACKWARD
            and node.forward in uses
            and node.name not in uses
            and node.op in (*_CONTRACTIONS, _EMBEDDING_BACKWARD)
            and sorted(self.graph.tensor(node.outputs[0]).shape) == shape
        }
        nodes: list[Node] = []
        for node in self.graph.nodes:
            self.made = []
            if node.name in uses:
                self._slice_use(uses[node.name])
            elif node.name in gradients:
                self._slice_gradient(node)
            nodes += self.made or [node]
        return self.graph.with_nodes(tuple(nodes), types=self.types)

    # Slices

    def _slice_use(self, use: _Use) -> None:
        node, factor = use.node, self.graph.tensor(use.node.args[use.position].name)
        if node.op == _EMBEDDING:
            if self.how.along is not SliceAlong.OUTPUT:
                raise self._misfit(node, "rows of an embedding are not sliced", "along='output'")
            self._by_outputs(node, 0, -1, use.chain, settled=False)
            return
        left, right, _ = _CONTRACTIONS[node.op]
        is_left = use.position == left
        # As left factor (i k), the rows of the parameter make outputs; as right factor (k j), its
        # columns. Counted from the last dim, because a batch may be in front.
        output, summed = (-2, -1) if is_left else (-1, -2)
        extents = {
            SliceAlong.OUTPUT: factor.shape[output],
            SliceAlong.CONTRACTION: factor.shape[summed],
        }
        # If both fit, or neither, take the requested one; `_check` then refuses a misfit.
        fit = [along for along, extent in extents.items() if extent % self.how.count == 0]
        along = fit[0] if len(fit) == 1 else self.how.along
        if along is SliceAlong.OUTPUT or node.op not in _SUMMABLE:
            self._by_outputs(node, use.position, output, use.chain, settled=False)
            return
        self._check(node, factor.shape[summed])
        self._by_addends(use, right if is_left else left, (summed, output))

    def _slice_gradient(self, node: Node) -> None:
        """Slice the gradient by rows, or by columns if the rows cannot be cut."""
        if node.op == _EMBEDDING_BACKWARD:
            self._by_outputs(node, 0, -1, (), settled=True)
            return
        left, right, _ = _CONTRACTIONS[node.op]
        rows = self.graph.tensor(node.outputs[0]).shape[-2]
        # In dW = x' dy, rows take slices of x' (left) and columns slices of dy (right).
        position, dim = (left, -2) if rows % self.how.count == 0 else (right, -1)
        self._by_outputs(node, position, dim, (), settled=True)

    def _by_outputs(
        self, node: Node, position: int, dim: int, chain: Sequence[Node], *, settled: bool
    ) -> None:
        """Compute slices of the output from slices of one argument, and join them.

        Both are cut along the same dim, counted from the last.
        """
        count, name = self.how.count, node.outputs[0]
        whole, made = self.graph.tensor(node.args[position].name), self.graph.tensor(name)
        self._check(node, whole.shape[dim])
        out = dim % len(made.shape)
        part = replace(made, shape=_cut(made.shape, out, count))
        # The first slice waits for the data of the operator, each later one for the slice before.
        # So no slice is gathered early, and no two at once:
        #
        #     x ----> piece 0 -> y/0 ----> piece 1 -> y/1 ----> ...    -> stack, view
        sliced = node.args[position].name
        *factors, added = _CONTRACTIONS.get(node.op, (0, 1, -1))
        others = (node.args[at].name for at in factors if at != position)
        data = {value for value in self.graph.tensor_inputs(node) if value != sliced}
        token = next((value for value in others if value in data), sliced)
        parts: list[str] = []
        for index in range(count):
            args = list(node.args)
            args[position] = Ref(self._piece(node, position, dim, index, token, chain, settled))
            if added >= 0:
                args[added] = self._added(node, node.args[added], dim, index)
            token = self._add(node, f"{name}/{index}", node.op, tuple(args), part)
            parts.append(token)
        # Slice j has the elements j, j + count, ...: stacked after the dim, not concatenated.
        #
        #     y/0 = a c e, y/1 = b d f   ->   stack   a b   ->   view   a b c d e f
        #                                             c d
        #                                             e f
        shape = (*part.shape[: out + 1], count, *part.shape[out + 1 :])
        stacked = self._add(
            node, f"{name}/parts", "aten.stack.default",
            (tuple(map(Ref, parts)), out + 1), replace(made, shape=shape), part=False,
        )  # fmt: skip
        self._last(node, "aten.view.default", (Ref(stacked), made.shape))

    def _by_addends(self, use: _Use, other: int, dims: tuple[int, int]) -> None:
        """Sum products of slices of both factors."""
        node, count = use.node, self.how.count
        name, added = node.outputs[0], _CONTRACTIONS[node.op][2]
        made, data = self.graph.tensor(name), self.graph.tensor(node.args[other].name)
        dim = dims[1] % len(data.shape)
        # Each slice adds its product to the sum so far, which starts as the bias, so only one sum
        # is alive. The last slice makes the operator's output.
        total: Argument = node.args[added] if added >= 0 else None
        token = node.args[other].name
        adding = _ADDING[len(made.shape)]
        for index in range(count):
            piece = self._piece(node, use.position, dims[0], index, token, use.chain, False)
            taken = self._add(
                node, f"{name}/taken/{index}", "aten.slice.Tensor",
                (node.args[other], dim, index, data.shape[dim], count),
                replace(data, shape=_cut(data.shape, dim, count)),
            )  # fmt: skip
            factors = (Ref(taken), Ref(piece)) if use.position > other else (Ref(piece), Ref(taken))
            op = node.op if total is None else adding
            args = factors if total is None else (total, *factors)
            if index == count - 1:
                self._last(node, op, args)
            else:
                token = self._add(node, f"{name}/{index}", op, args, made, part=False)
                total = Ref(token)

    def _piece(
        self,
        node: Node,
        position: int,
        dim: int,
        index: int,
        token: str,
        chain: Sequence[Node],
        settled: bool,
    ) -> str:
        """Add one slice of an argument: a slice of the parameter, then its views and casts."""
        value = chain[0].args[0].name if chain else node.args[position].name
        at = dim % len(self.graph.tensor(node.args[position].name).shape)
        # Slices are taken from the parameter, so the dim is traced back from the operator to it: w
        # -> t -> mm, sliced by columns, takes rows of w. Then views and casts are applied to each
        # slice.
        for view in reversed(chain):
            at = _order(view, len(self.graph.tensor(view.outputs[0]).shape))[at]
        kind = self.graph.tensor(value)
        count = self.how.count
        base = value if chain or value == self.name else f"{node.outputs[0]}/taken"
        made = self._add(
            node, f"{base}/{index}", "sbp.piece",
            (Ref(value), Ref(token), at, index, count, settled),
            replace(kind, shape=_cut(kind.shape, at, count)),
        )  # fmt: skip
        for view in chain:
            before, after = (self.graph.tensor(v) for v in (view.args[0].name, view.outputs[0]))
            at = _order(view, len(before.shape)).index(at)
            made = self._add(
                node, f"{view.outputs[0]}/{index}", view.op, (Ref(made), *view.args[1:]),
                replace(after, shape=_cut(after.shape, at, count)), view,
            )  # fmt: skip
        return made

    def _added(self, node: Node, added: Argument, dim: int, index: int) -> Argument:
        """Return the slice of the bias for a slice of the output."""
        kind = self.graph.tensor(added.name)
        # Broadcast along the dim: every slice takes all of it.
        if len(kind.shape) < -dim or kind.shape[dim] == 1:
            return added
        at, count = dim % len(kind.shape), self.how.count
        part = replace(kind, shape=_cut(kind.shape, at, count))
        args = (added, at, index, kind.shape[at], count)
        return Ref(self._add(node, f"{added.name}/{index}", "aten.slice.Tensor", args, part))

    # Nodes

    def _add(
        self,
        node: Node,
        name: str,
        op: str,
        args: tuple[Argument, ...],
        kind: TensorType,
        like: Node | None = None,
        *,
        part: bool = True,
    ) -> str:
        while name in self.taken:
            name += "'"
        self.taken.add(name)
        self.types[name] = kind
        keeps = op == node.op or like is not None
        tags = (like or node).tags if keeps else _marks(node)
        self.made.append(
            replace(
                node,
                name=name,
                op=op,
                args=args,
                kwargs=like.kwargs if like is not None else {},
                outputs=(name,),
                tags=(*tags, f"slice:{self.how.count}") if part else tags,
            )
        )
        return name

    def _last(self, node: Node, op: str, args: tuple[Argument, ...]) -> None:
        """Add the node that makes the output of the original operator."""
        tags = node.tags if op == node.op else _marks(node)
        self.made.append(replace(node, op=op, args=args, kwargs={}, tags=tags))

    def _check(self, node: Node, extent: int) -> None:
        if extent % self.how.count:
            divisors = [n for n in range(2, min(extent, 64) + 1) if extent % n == 0]
            raise self._misfit(
                node,
                f"{extent} elements are not {self.how.count} equal slices",
                f"count={', '.join(map(str, divisors))}" if divisors else "dims with equal parts",
            )

    def _misfit(self, node: Node, what: str, accepted: str) -> ConfigError:
        return ConfigError(
            f"the operators of {self.name!r} cannot be sliced: {what}",
            where=node.where(),
            accepted=accepted,
        )


def _marks(node: Node) -> tuple[str, ...]:
    """Return the tags of a node about its place, not about its operator."""
    return tuple(tag for tag in node.tags if tag.split(":")[0] == "recompute")


def _cut(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _order(view: Node, num_dims: int) -> list[int]:
    """Return the dim of the argument for each dim of a view."""
    order = list(range(num_dims))
    if view.op == "aten.t.default":
        order.reverse()
    elif view.op == "aten.transpose.int":
        first, second = (dim % num_dims for dim in view.args[1:3])
        order[first], order[second] = order[second], order[first]
    elif view.op == "aten.permute.default":
        order = [dim % num_dims for dim in view.args[1]]
    return order
