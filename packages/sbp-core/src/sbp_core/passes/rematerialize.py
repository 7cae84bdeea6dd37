"""Make forward values again in the backward phase: the rewriting that `recompute` decides on.

A *region* is a run of forward nodes, a block of the model. What its backward nodes use of it is
computed again, right before the first of them, from what was kept: the values that come into the
region, and those of its nodes that are not made again. So no two regions' values live together.

The nodes made again wait for the gradient that comes into their region: their arguments pass
through `sbp.after(x, gradient)`, which is x and no copy, and gives no backward schedule a chance to
run them early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sbp_core.graph.ir import InputKind, LogicalGraph, Node, Phase, Ref, ValueType
from sbp_core.graph.rewrite import drop_dead, rename_uses
from sbp_core.passes.saved_activations import call_flop, is_forward

#: Tag of nodes that make forward values again.
REMATERIALIZED = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of forward nodes, by name.

    Args:
        name: What reports call it.
        members: All its nodes.
        again: Those whose values may be made again.
    """

    name: str
    members: frozenset[str]
    again: frozenset[str]


def rematerialize(graph: LogicalGraph, regions: Sequence[Region]) -> LogicalGraph:
    """Compute what backward nodes use of some regions again, in the backward phase.

    before: h = mm(x, w); a = gelu(h); ...   dh = gelu_backward(da, h)
    after:  h = mm(x, w); a = gelu(h); ...   x.after = sbp.after(x, da)
            h.again = mm(x.after, w); dh = gelu_backward(da, h.again)
    """
    made = _Rewriting(graph, _Plan(graph, regions)).run()
    return drop_dead(made)


class _Plan:
    """Which uses of which values are served by values made again."""

    def __init__(self, graph: LogicalGraph, regions: Sequence[Region]) -> None:
        self.graph = graph
        self.place = {node.name: index for index, node in enumerate(graph.nodes)}
        self.region_of = {name: region for region in regions for name in region.again}
        self.kept = {out.value for out in graph.outputs}
        # The last region first: what it reads of those before it is kept for it.
        self.regions = sorted(
            (region for region in regions if region.again),
            key=lambda region: -min(self.place[name] for name in region.members),
        )
        self.uses = {region.name: list(self._backward_uses(region)) for region in self.regions}
        self._keep_what_is_read()

    def region(self, value: str) -> Region | None:
        """Return the region that makes a value again, if any."""
        node = self.graph.producers.get(value)
        return None if node is None else self.region_of.get(node.name)

    def is_again(self, value: str, user: Node) -> bool:
        """Return whether a backward node uses a value as made again."""
        region = self.region(value)
        if region is None or value in self.kept:
            return False
        return user.forward in region.members or not self._leaves(region, value)

    def _leaves(self, region: Region, value: str) -> bool:
        """Return whether forward nodes outside the region use a value."""
        users = self.graph.users[value]
        return any(is_forward(user) and user.name not in region.members for user in users)

    def _backward_uses(self, region: Region) -> Iterator[tuple[Node, str]]:
        for name in region.again:
            for value in self.graph.by_name[name].outputs:
                for user in self.graph.users[value]:
                    if not is_forward(user):
                        yield user, value

    def _keep_what_is_read(self) -> None:
        for region in self.regions:
            for user, value in self.uses[region.name]:
                if user.phase is not Phase.BACKWARD or (
                    user.forward not in region.members and self._leaves(region, value)
                ):
                    self.kept.add(value)
        grown = True
        while grown:  # a second round only where regions read each other
            grown = False
            for region in self.regions:
                read = set(self._read_from_outside(region)) - self.kept
                self.kept |= read
                grown = grown or any(self.region(value) for value in read)

    def _read_from_outside(self, region: Region) -> Iterator[str]:
        """Yield the values that making a region again takes from elsewhere."""
        todo = [value for user, value in self.uses[region.name] if self.is_again(value, user)]
        seen: set[str] = set()
        while todo:
            value = todo.pop()
            if value in self.kept or self.region(value) is not region:
                yield value
                continue
            node = self.graph.producers[value]
            if node.name not in seen:
                seen.add(node.name)
                todo += self.graph.tensor_inputs(node)


class _Rewriting:
    """The state of one rewriting."""

    def __init__(self, graph: LogicalGraph, plan: _Plan) -> None:
        self.graph, self.plan = graph, plan
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = dict(graph.types)
        self.names: dict[str, str] = {}
        self.gates: dict[tuple[str, str], str] = {}
        self.gradients: dict[str, str] = {}
        self.backward_made: set[str] = set()
        self.taken = {*graph.types, *graph.by_name}

    def run(self) -> LogicalGraph:
        for index, node in enumerate(self.graph.nodes):
            if node.phase is not Phase.BACKWARD:
                self.nodes.append(node)
                continue
            used = [v for v in dict.fromkeys(node.inputs()) if self.plan.is_again(v, node)]
            missing = [value for value in used if value not in self.names]
            if missing:
                self._make(missing, index)
            self.nodes.append(rename_uses(node, {value: self.names[value] for value in used}))
            self.backward_made.update(node.outputs)
        return self.graph.with_nodes(tuple(self.nodes), types=self.types)

    def _make(self, values: Iterable[str], index: int) -> None:
        """Add the nodes that make some values again, before the node of that index."""
        needed: dict[str, Region] = {}
        todo = list(values)
        while todo:
            value = todo.pop()
            region = self.plan.region(value)
            if value in self.plan.kept or region is None or value in self.names:
                continue
            node = self.graph.producers[value]
            if node.name not in needed:
                needed[node.name] = region
                todo += self.graph.tensor_inputs(node)
        for name in sorted(needed, key=self.plan.place.__getitem__):
            self._copy(self.graph.by_name[name], needed[name], index)

    def _copy(self, node: Node, region: Region, index: int) -> None:
        names = {value: self.names[value] for value in node.inputs() if value in self.names}
        waits = any(value in names for value in self.graph.tensor_inputs(node))
        for value in dict.fromkeys(self.graph.tensor_inputs(node)):
            if value not in names and self._is_kept(value):
                names[value] = self._gate(value, node, region, index)
                waits = True
        if not waits and call_flop(self.graph, node):  # of parameters only, such as a cast
            for value in self.graph.tensor_inputs(node)[:1]:
                names[value] = self._gate(value, node, region, index)
        made = tuple(self._fresh(f"{value}.{REMATERIALIZED}") for value in node.outputs)
        self.types |= {
            new: self.graph.types[old] for old, new in zip(node.outputs, made, strict=True)
        }
        self.names |= zip(node.outputs, made, strict=True)
        name = (
            made[0]
            if made[0] == f"{node.name}.{REMATERIALIZED}"
            else self._fresh(f"{node.name}.{REMATERIALIZED}")
        )
        self.nodes.append(
            replace(
                rename_uses(node, names),
                name=name,
                outputs=made,
                phase=Phase.BACKWARD,
                forward=node.name,
                tags=(
                    *(tag for tag in node.tags if not tag.startswith("recompute")),
                    REMATERIALIZED,
                ),
            )
        )

    def _is_kept(self, value: str) -> bool:
        """Whether a value was made by the forward phase, or is of the batch."""
        entry = self.graph.input_kinds.get(value)
        return entry is None or entry.kind is InputKind.BATCH

    def _gate(self, value: str, user: Node, region: Region, index: int) -> str:
        """Return the value as it is once the region's gradient has come."""
        if (region.name, value) in self.gates:
            return self.gates[region.name, value]
        gradient = self._gradient(region, index)
        if not gradient:
            return value
        name = self._fresh(f"{value}.after")
        self.types[name] = self.graph.types[value]
        self.gates[region.name, value] = name
        self.nodes.append(
            Node(
                name=name,
                op="sbp.after",
                args=(Ref(value), Ref(gradient)),
                outputs=(name,),
                phase=Phase.BACKWARD,
                module=user.module,
                source=user.source,
                forward=user.name,
                tags=(REMATERIALIZED,),
            )
        )
        return name

    def _gradient(self, region: Region, index: int) -> str:
        """Return what the backward nodes of a region, from an index on, are given first.

        It is a value that the backward phase has made before; empty if they need none.
        """
        for node in self.graph.nodes[index:]:
            if node.phase is Phase.BACKWARD and node.forward in region.members:
                made = [v for v in self.graph.tensor_inputs(node) if v in self.backward_made]
                if made:
                    self.gradients[region.name] = made[0]
                    return made[0]
        return self.gradients.get(region.name, "")

    def _fresh(self, name: str) -> str:
        while name in self.taken:
            name += "'"
        self.taken.add(name)
        return name
