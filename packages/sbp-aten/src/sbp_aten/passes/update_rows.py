"""Update the rows of a table that a step has looked up, and leave the others alone.

The gradient of an embedding is zero in all rows that are not looked up, so work on all rows grows
with the vocabulary for nothing. If an update provably changes no row without a gradient, in the
parameter and in each of its states, gradient and update are rewritten for the rows looked up:

    before: g = embedding_dense_backward(dy, i, 1000000, ..); s1 = addcmul(s, g, g)
            w1 = addcdiv(w, g, add(sqrt(s1), 1e-10))
    after:  rows, sums = sbp.unique_rows(i, dy); w1, s1 = sbp.row_update(rows, sums, (w, s), ..)

The proof is `zero_rows`, not a list of optimizers: plain SGD and Adagrad pass; momentum, Adam and
weight decay do not, because they change every row in every step. Their updates stay as they are.
Sums of squares, such as for clipping by norm, are taken over the sums by row.

Micro-batches keep their lookups and gradients ("stack"), in place of the sum of whole gradients.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sbp_aten.pass_options import RowUpdates
from sbp_aten.passes.row_gradients import Lookups, NoRows
from sbp_aten.passes.zero_rows import ZERO, RowFact, facts_of
from sbp_aten.traits import ROW_REDUCTIONS
from sbp_core.graph import (
    Argument,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Ref,
    TensorType,
    ValueType,
    drop_dead,
    map_refs,
    rename_uses,
)

_LOG = logging.getLogger(__name__)

#: Kinds of operators that map each element, and that ATen does not tag.
_ELEMENTWISE = frozenset({"_to_copy", "clone"})


def update_rows(graph: LogicalGraph, how: RowUpdates) -> LogicalGraph:
    """Rewrite the updates of tables for the rows that are looked up, where that is provably equal.

    before: g = embedding_dense_backward(dy, i, ..); w1 = add(w, g, alpha=-0.1)
    after:  rows, sums = sbp.unique_rows(i, dy); w1 = sbp.row_update(rows, sums, (w,), add, ..)

    Args:
        graph: A training step, after the accumulation over micro-batches.
        how: Which tables.
    """
    for entry in graph.inputs:
        if entry.kind is InputKind.PARAMETER and graph.is_tensor(entry.name):
            try:
                graph = _Table(graph, entry.name, how).rewritten()
            except NoRows as reason:
                if str(reason):
                    _LOG.info("%s: every row is updated in each step: %s", entry.name, reason)
    return graph


def whole_tables(graph: LogicalGraph) -> dict[str, str]:
    """Return why every row is updated of the large tables that a prepared step looks up, by name.

    Args:
        graph: The result of `prepare_step`.
    """
    found: dict[str, str] = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.PARAMETER and graph.is_tensor(entry.name):
            try:
                _Table(graph, entry.name, RowUpdates()).rewritten()
                found[entry.name] = "compile.passes.update_rows is off"
            except NoRows as reason:
                if str(reason) and not reason.is_small:
                    found[entry.name] = str(reason)
    return found


@dataclass(slots=True)
class _Table:
    """The update of one parameter, and its rewriting."""

    graph: LogicalGraph
    name: str
    how: RowUpdates
    #: What is known of each value of the update with a row for each row of the table.
    facts: dict[str, RowFact] = field(default_factory=dict)
    #: Values that follow from the gradient alone.
    pure: set[str] = field(default_factory=set)
    #: Reductions of all rows of a value that follows from the gradient alone.
    reductions: list[Node] = field(default_factory=list)

    def rewritten(self) -> LogicalGraph:
        """Return the graph with the update by rows.

        Raises:
            NoRows: it stays as it is; the message says why, or is empty for other parameters.
        """
        graph, kind = self.graph, self.graph.tensor(self.name)
        if len(kind.shape) != 2 or self.name not in graph.new_states:
            raise NoRows
        lookups = Lookups(graph, kind)
        roots = lookups.roots(graph.new_states[self.name])
        if not roots:
            raise NoRows
        users = {user.name: user for root in roots for user in graph.users[root]}
        if self.how.when == "profitable" and lookups.count(roots) * self.how.factor > kind.shape[0]:
            count = lookups.count(roots)
            raise NoRows(f"it has {kind.shape[0]} rows, and a step looks up {count}", is_small=True)
        if not users:
            raise NoRows
        for root in roots:
            self.facts[root] = ZERO
            self.pure.add(root)
        leaves = self._leaves()
        for leaf in leaves:
            self.facts[leaf] = RowFact(same=leaf)
        self._follow(roots)
        written = self._written(leaves)
        return self._replaced(lookups, roots, leaves, written)

    def _leaves(self) -> list[str]:
        """Return the table, and its states with a row for each row of it."""
        rows = self.graph.tensor(self.name).shape[0]
        states = [e.name for e in self.graph.inputs if e.of == self.name]
        return [self.name, *(one for one in states if self._has_rows(one, rows))]

    def _has_rows(self, value: str, rows: int) -> bool:
        """Whether a value has a row, or a number, for each row of the table."""
        kind, width = self.graph.types[value], self.graph.tensor(self.name).shape[1]
        return isinstance(kind, TensorType) and kind.shape in ((rows, width), (rows, 1))

    def _follow(self, roots: Sequence[str]) -> None:
        """Find what is known of all values of the update.

        Raises:
            NoRows: an operator mixes rows, or is outside of the update.
        """
        rows = self.graph.tensor(self.name).shape[0]
        for node in self.graph.nodes:
            if not {*roots}.isdisjoint(node.outputs):
                continue
            given = [v for v in self.graph.tensor_inputs(node) if v in self.facts]
            own = [v for v in given if v not in self.graph.input_kinds]
            if not given or (not own and node.phase is not Phase.OPTIMIZER):
                continue
            others = set(self.graph.tensor_inputs(node)) - set(given)
            if any(self.graph.tensor(v).shape for v in others):
                raise NoRows(f"{node.op} takes {min(others)!r}, which is not of this table")
            if self._reduces_all(node):
                self.reductions.append(node)
                continue
            if not self._maps_rows(node, rows):
                raise NoRows(f"{node.op} ({node.name}) takes all rows")
            found = facts_of(self.graph, node, self.facts.get)
            self.facts |= zip(node.outputs, found, strict=True)
            if self.pure.issuperset(given):
                self.pure.update(node.outputs)

    def _maps_rows(self, node: Node, rows: int) -> bool:
        """Whether each row of the results follows from that row of the arguments."""
        if "seeded" in node.tags or not all(self._has_rows(v, rows) for v in node.outputs):
            return False
        if node.kind in ROW_REDUCTIONS:
            dims = node.args[1] if len(node.args) > 1 else ()
            listed = dims if isinstance(dims, tuple) else (dims,)
            return bool(listed) and all(dim in (1, -1) for dim in listed)
        return "pointwise" in node.tags or node.kind in _ELEMENTWISE

    def _reduces_all(self, node: Node) -> bool:
        """Whether a node sums all elements of a value that is zero wherever the gradient is."""
        value = node.inputs()[0]
        is_sum = node.op == "aten.sum.default" and not node.kwargs
        return is_sum and value in self.pure and self.facts[value].zero

    def _written(self, leaves: Sequence[str]) -> dict[str, str]:
        """Return the new value of each state of the table.

        Raises:
            NoRows: a row without a gradient may change, or another output needs all rows.
        """
        inner = {value for value in self.facts if value not in self.graph.input_kinds}
        written: dict[str, str] = {}
        for out in self.graph.outputs:
            if out.value not in inner:
                continue
            if out.kind is not OutputKind.STATE or out.name not in leaves:
                raise NoRows(f"{out.name!r} takes all rows")
            if self.facts[out.value].same != out.name:
                raise NoRows(f"{out.name!r} changes in rows without a gradient")
            written[out.name] = out.value
        if self.name not in written or len(set(written.values())) < len(written):
            raise NoRows("its new value does not follow from this gradient alone")
        return written

    def _replaced(
        self,
        lookups: Lookups,
        roots: Sequence[str],
        leaves: Sequence[str],
        written: dict[str, str],
    ) -> LogicalGraph:
        graph = self.graph
        places = {node.name: at for at, node in enumerate(graph.nodes)}
        made_at = max(places[graph.producers[root].name] for root in roots)
        # The first use, after all gradients are there.
        users = {user.name for root in roots for user in graph.users[root]}
        first = next(n for n in graph.nodes if n.name in users)
        if places[first.name] < made_at:
            raise NoRows(f"{first.op} uses one gradient before another one is there")
        made = lookups.unique(roots, first)
        program, used = self._program(roots, set(written.values()), leaves)
        tensors = [*written, *(leaf for leaf in leaves if leaf in used and leaf not in written)]
        last = graph.producers[written[self.name]]
        update = Node(
            name=f"{self.name}.update.rows",
            op="sbp.row_update",
            args=(
                Ref(made.rows),
                tuple(map(Ref, made.sums)),
                tuple(map(Ref, tensors)),
                self._numbered(program, roots, tensors),
                tuple(f"~{value}" for value in written.values()),
            ),
            outputs=tuple(written.values()),
            phase=Phase.OPTIMIZER,
            rate=last.rate,
            module=last.module,
            source=last.source,
        )
        gone = {node.name for node in graph.nodes if set(node.outputs) & set(written.values())}
        types: dict[str, ValueType] = {**graph.types, **made.types}
        before = defaultdict(list, {name: list(nodes) for name, nodes in made.nodes.items()})
        sums = dict(zip(roots, made.sums, strict=True))
        compact = self._compact(sums, types, before)
        at_last = max(graph.nodes.index(graph.by_name[name]) for name in gone)
        nodes: list[Node] = []
        for at, node in enumerate(graph.nodes):
            nodes += before.get(node.name, ())
            if node.name in compact:
                node = compact[node.name]
            if node.name not in gone:
                nodes.append(node)
            if at == at_last:
                nodes.append(update)
        return drop_dead(graph.with_nodes(tuple(nodes), types=types))

    def _program(
        self, roots: Sequence[str], wanted: set[str], leaves: Sequence[str]
    ) -> tuple[list[Node], set[str]]:
        """Return the nodes of the update of one row, in order, and the inputs that they use."""
        needed, program = set(wanted), list[Node]()
        for node in reversed(self.graph.nodes):
            if needed.isdisjoint(node.outputs) or not {*roots}.isdisjoint(node.outputs):
                continue
            if self.facts.keys() >= set(node.outputs):
                program.append(node)
                needed |= {v for v in node.inputs() if v in self.facts}
        return program[::-1], needed & set(leaves)

    def _numbered(
        self, program: Sequence[Node], roots: Sequence[str], tensors: Sequence[str]
    ) -> tuple[Argument, ...]:
        """Return the program of a row: see `sbp_aten.rules.row_updates`."""
        names = {root: f"~sums{at}" for at, root in enumerate(roots)}
        names |= {one: f"~row{at}" for at, one in enumerate(tensors)}
        for node in program:
            names |= {value: f"~{value}" for value in node.outputs}

        def changed(ref: Ref) -> Argument:
            return names.get(ref.name, ref)

        return tuple(
            (
                tuple(names[value] for value in node.outputs),
                node.op,
                map_refs(node.args, changed),
                tuple((key, map_refs(value, changed)) for key, value in node.kwargs.items()),
            )
            for node in program
        )

    def _compact(
        self,
        sums: Mapping[str, str],
        types: dict[str, ValueType],
        before: dict[str, list[Node]],
    ) -> dict[str, Node]:
        """Return the reductions, of sums by row in place of whole gradients; by name."""
        names = dict(sums)
        found: dict[str, Node] = {}

        def on_rows(value: str) -> str:
            if value not in names:
                node = self.graph.producers[value]
                inner = [on_rows(one) for one in node.inputs() if one in self.facts]
                names[value] = f"{value}.rows"
                like, kind = types[inner[0]], self.graph.tensor(value)
                assert isinstance(like, TensorType), "it has rows"
                types[names[value]] = replace(kind, shape=(like.shape[0], *kind.shape[1:]))
                made = rename_uses(node, names)
                name = f"{node.name}.rows"
                before[node.name].append(replace(made, name=name, outputs=(names[value],)))
            return names[value]

        for node in self.reductions:
            found[node.name] = replace(node, args=(Ref(on_rows(node.inputs()[0])),))
        return found
