"""Rematerialisation: rewrite a graph so that the backward phase recomputes forward values.

A *region* is a run of forward nodes, a block of the model. Its backward nodes use some of its
values. These are recomputed right before the first of those nodes, from saved values: the inputs of
the region, and the values of its nodes that are not recomputed. So the recomputed values of two
regions are never alive together:

    forward     region 1     region 2
    saved       x0           x1                    inputs of the regions
    backward                 recompute 2, backward 2    recompute 1, backward 1

Recomputed nodes wait for the gradient of their region's output: their arguments pass through
`sbp.after(x, gradient)`, which is x without a copy. So no schedule can run them early, when their
results would only take memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sbp_core.graph.ir import InputKind, LogicalGraph, Node, Phase, Ref, ValueType
from sbp_core.graph.primitives import AFTER
from sbp_core.graph.rewrite import drop_dead, rename_uses
from sbp_core.passes.saved_activations import call_flop, is_forward

#: Tag of nodes that recompute forward values.
REMATERIALIZED = "recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of forward nodes, by name.

    Args:
        name: Its name in reports.
        members: All its nodes.
        recomputable: The nodes whose values may be recomputed.
    """

    name: str
    members: frozenset[str]
    recomputable: frozenset[str]


def rematerialize(graph: LogicalGraph, regions: Sequence[Region]) -> LogicalGraph:
    """Recompute the values of some regions that backward nodes use, in the backward phase.

    before: h = mm(x, w); a = gelu(h); ...   dh = gelu_backward(da, h)
    after:  h = mm(x, w); a = gelu(h); ...   x.after = sbp.after(x, da)
            h.recomputed = mm(x.after, w); dh = gelu_backward(da, h.recomputed)
    """
    made = _Rewriting(graph, _ReplacedUses(graph, regions)).run()
    return drop_dead(made)


class _ReplacedUses:
    """Which uses of forward values are replaced by recomputed ones, and which values are saved."""

    def __init__(self, graph: LogicalGraph, regions: Sequence[Region]) -> None:
        self.graph = graph
        self.position = {node.name: index for index, node in enumerate(graph.nodes)}
        self.region_of = {name: region for region in regions for name in region.recomputable}
        # Results of the forward phase, such as new buffers, are available anyway.
        self.saved = {out.value for out in graph.outputs}
        # The last region first: values of earlier regions that it reads are saved for it, and the
        # earlier regions then need not recompute them.
        self.regions = sorted(
            (region for region in regions if region.recomputable),
            key=lambda region: -min(self.position[name] for name in region.members),
        )
        #: For each region, the users of its values after the forward phase.
        self.uses = {
            region.name: [
                (user, value)
                for name in region.recomputable
                for value in graph.by_name[name].outputs
                for user in graph.users[value]
                if not is_forward(user)
            ]
            for region in self.regions
        }
        self._save_external_reads()

    def region(self, value: str) -> Region | None:
        """Return the region that may recompute a value, if any."""
        node = self.graph.producers.get(value)
        return None if node is None else self.region_of.get(node.name)

    def uses_recomputed(self, value: str, user: Node) -> bool:
        """Return whether a backward node uses the recomputed value in place of a saved one."""
        region = self.region(value)
        if region is None or value in self.saved:
            return False
        # Backward nodes of no region in particular, such as sums of gradients, are taken to be this
        # region's if no forward node outside uses the value. If one does, its backward nodes need
        # the value before this region is recomputed: `_save_external_reads` saves it for all.
        return user.forward in region.members or not self._is_used_outside(region, value)

    def _is_used_outside(self, region: Region, value: str) -> bool:
        """Return whether forward nodes outside the region use a value."""
        users = self.graph.users[value]
        return any(is_forward(user) and user.name not in region.members for user in users)

    def _save_external_reads(self) -> None:
        # Also saved: values that are used outside of the backward phase, as by the optimizer, and
        # values for backward nodes that belong to other forward nodes which use them.
        for region in self.regions:
            for user, value in self.uses[region.name]:
                if user.phase is not Phase.BACKWARD or (
                    user.forward not in region.members and self._is_used_outside(region, value)
                ):
                    self.saved.add(value)
        changed = True
        while changed:  # until nothing changes: regions may read each other
            changed = False
            for region in self.regions:
                read = set(self._external_reads(region)) - self.saved
                self.saved |= read
                changed = changed or any(self.region(value) for value in read)

    def _external_reads(self, region: Region) -> Iterator[str]:
        """Yield the values outside of a region that its recomputation reads."""
        todo = [
            value for user, value in self.uses[region.name] if self.uses_recomputed(value, user)
        ]
        seen: set[str] = set()
        while todo:
            value = todo.pop()
            # Recomputation begins at such a value and goes no further back.
            if value in self.saved or self.region(value) is not region:
                yield value
                continue
            node = self.graph.producers[value]
            if node.name not in seen:
                seen.add(node.name)
                todo += self.graph.tensor_inputs(node)


class _Rewriting:
    """The state of one rewriting."""

    def __init__(self, graph: LogicalGraph, plan: _ReplacedUses) -> None:
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
            # Recomputed at the first use, so as late as possible; later uses share the copy.
            used = [v for v in dict.fromkeys(node.inputs()) if self.plan.uses_recomputed(v, node)]
            missing = [value for value in used if value not in self.names]
            if missing:
                self._recompute(missing, index)
            self.nodes.append(rename_uses(node, {value: self.names[value] for value in used}))
            self.backward_made.update(node.outputs)
        return self.graph.with_nodes(tuple(self.nodes), types=self.types)

    def _recompute(self, values: Iterable[str], index: int) -> None:
        """Add the nodes that recompute some values, before the node of that index."""
        needed: dict[str, Region] = {}
        todo = list(values)
        while todo:
            value = todo.pop()
            region = self.plan.region(value)
            if value in self.plan.saved or region is None or value in self.names:
                continue
            node = self.graph.producers[value]
            if node.name not in needed:
                needed[node.name] = region
                todo += self.graph.tensor_inputs(node)
        for name in sorted(needed, key=self.plan.position.__getitem__):
            self._copy(self.graph.by_name[name], needed[name], index)

    def _copy(self, node: Node, region: Region, index: int) -> None:
        # The arguments of the copy: copies of recomputed arguments, which wait themselves; saved
        # values and parts of the batch after `sbp.after`; parameters unchanged, but the first of
        # them after `sbp.after` if nothing else would make the copy wait.
        names = {value: self.names[value] for value in node.inputs() if value in self.names}
        waits = any(value in names for value in self.graph.tensor_inputs(node))
        for value in dict.fromkeys(self.graph.tensor_inputs(node)):
            entry = self.graph.input_kinds.get(value)
            # Made by the forward phase, or a part of the batch.
            if value not in names and (entry is None or entry.kind is InputKind.BATCH):
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
        name = f"{node.name}.{REMATERIALIZED}"
        name = name if made[0] == name else self._fresh(name)
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

    def _gate(self, value: str, user: Node, region: Region, index: int) -> str:
        """Return the value after an `sbp.after` of the region's gradient."""
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
                op=AFTER,
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
        """Return the first gradient that a region's backward nodes take, from an index on.

        The backward phase has made it before; empty if they take none.
        """
        for node in self.graph.nodes[index:]:
            if node.phase is Phase.BACKWARD and node.forward in region.members:
                # Only a value from before this index: the graph stays in topological order.
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
