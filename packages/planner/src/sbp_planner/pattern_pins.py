"""Turn patterns of parallelism that were found in a step into pins: splits that are fixed.

The planners `manual` and `auto` use them. B is a replicated tensor.

    parameters along a dim         stored and used split, with their states, gradients and updates
    sums after `tensor`            summed at once: B, for all ranks that use them further
    values that lead to `tensor`   B: computed by every rank; if split they would be gathered again
    values that make `classes`     B: else gradients of parameters are partial sums
    values along `classes` and     split if all their users can take them split; so is the batch
      `sequence`

Other pins and inference decide the rest (such as where samples are split).
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from sbp_core.graph import InputKind, LogicalGraph, Node, Phase, Ref
from sbp_core.placement import Placement
from sbp_core.sbp import Partial, Split
from sbp_core.signatures import OpCall, derive, is_view
from sbp_planner.dim_groups import DimGroup, GroupRole, label_splits
from sbp_planner.guide import update_values
from sbp_planner.patterns import Patterns, by_axis, parameter_names


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPins:
    """The pins of the patterns that were found.

    Args:
        pins: Pattern of a name -> mesh axis -> SBP.
        explanation: A line for each pattern, with what it splits.
    """

    pins: Mapping[str, Mapping[str, str]]
    explanation: tuple[str, ...]


def pattern_pins(
    graph: LogicalGraph, mesh: Placement, patterns: Mapping[str, Sequence[str]]
) -> PatternPins:
    """Return the pins of patterns.

    Args:
        graph: The step.
        mesh: The mesh of one stage.
        patterns: Mesh axis -> names of patterns; later ones split what earlier ones leave, and
            `tensor`, which splits all that it can, comes last. A pattern that ends in `?` is left
            out if the graph does not have it. The axis `*` means every axis that is not named.

    Raises:
        ConfigError: a pattern is not in the graph, or earlier ones leave nothing for it.
    """
    pins: dict[str, dict[str, str]] = {}
    lines: list[str] = []
    for at, (axis, size) in enumerate(zip(mesh.axes, mesh.mesh_shape, strict=True)):
        split: dict[str, str] = {}
        # With one rank there is nothing to split.
        asked = by_axis(patterns, axis) if size > 1 else ()
        before = prod(mesh.mesh_shape[:at])
        for wanted in sorted(asked, key=lambda name: name.removesuffix("?") == "tensor"):
            name = wanted.removesuffix("?")
            found = Patterns(graph=graph, axis=axis, size=size, before=before, split=split)
            groups = found.find(name, optional=name != wanted)
            if not groups:
                lines.append(f"{name} on {axis}: not in this model")
                continue
            split.update((value, name) for group in groups for value in group.by_value)
            maker = PinnedGroups(found)
            maker.parameters(groups)
            if name == "tensor":
                maker.sums(groups)
                maker.stream(groups)
            elif name in ("classes", "sequence"):
                maker.values(groups)
            if name == "classes":
                maker.features(groups)
            for pattern, entry in maker.pins.items():
                pins.setdefault(pattern, {})[axis] = entry
            lines.append(f"{name} on {axis}: {_described(name, graph, groups)}")
    return PatternPins(pins=pins, explanation=tuple(lines))


@dataclass(slots=True)
class PinnedGroups:
    """Collects the pins of groups of dims on one mesh axis: pattern of a name -> SBP."""

    found: Patterns
    pins: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> LogicalGraph:
        """The step."""
        return self.found.graph

    def named(self, groups: Sequence[DimGroup]) -> None:
        """Split all that has the dims of some groups, and sum at once after them; see `tensor`."""
        self.parameters(groups)
        self.values(groups)
        if summed := [group for group in groups if group.of(GroupRole.CONTRACTS)]:
            self.sums(summed)
            self.stream(summed)

    def others(self, groups: Sequence[DimGroup]) -> None:
        """Keep whole all values of the forward pass without the dims, but sums that are on the way.

        An operator that sums over the dims makes partial sums; `sums` says which value is summed.
        """
        skipped = {value for group in groups for value in group.by_value}
        for use in (use for group in groups for use in group.of(GroupRole.CONTRACTS)):
            value, last = use.node.outputs[0], self._summed(use.node.outputs[0])
            while value != last:
                skipped.add(value)
                value = self.graph.users[value][0].outputs[0]
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD and skipped.isdisjoint(node.outputs):
                self._pin_whole(
                    [name for name in node.outputs if name in self.found.shown.of_batch]
                )

    def parameters(self, groups: Sequence[DimGroup]) -> None:
        """Split parameters in storage and use, and with them all values of their shape.

        These are optimizer states, values made of a parameter alone, its gradient and its update.
        """
        states: dict[str, list[str]] = {}
        for entry in self.graph.inputs:
            if entry.of and self.graph.is_tensor(entry.name):
                states.setdefault(entry.of, []).append(entry.name)
        updates = update_values(self.graph)
        for value, dim in (one for group in groups for one in group.dims):
            if not self.found.shown.made_of.get(value):
                continue
            names = [value]
            if value in self.graph.input_kinds:
                shape = self.graph.tensor(value).shape
                names += [n for n in states.get(value, ()) if self.graph.tensor(n).shape == shape]
                names += [f"use:{value}", *updates.get(value, ())]
            self.pins.update({_literal(name): f"S({dim})" for name in names})

    def sums(self, groups: Sequence[DimGroup]) -> None:
        """Pin the sums over dims that parameters contract."""
        for group in groups:
            for use in group.of(GroupRole.CONTRACTS):
                self.pins[_literal(self._summed(use.node.outputs[0]))] = "B"

    def _summed(self, value: str) -> str:
        """Return the value to sum: after views, and after operators that make it smaller."""
        best = value
        while True:
            users = [user for user in self.graph.users[value] if user.phase is Phase.FORWARD]
            if len(users) != 1 or not self._passes_sums(users[0], value):
                return best
            value = users[0].outputs[0]
            smaller = self.graph.tensor(value).size_bytes < self.graph.tensor(best).size_bytes
            if smaller or (is_view(users[0].op) and users[0].args[0] == Ref(best)):
                best = value

    def _passes_sums(self, node: Node, *values: str) -> bool:
        """Whether an operator turns partial sums of all these arguments into partial sums."""
        call = OpCall.of(self.graph, node)
        for signature in derive(call, self.found.size):
            entries = zip(call.tensor_names, signature.inputs, strict=True)
            partial = {name for name, sbp in entries if isinstance(sbp, Partial)}
            if partial == set(values) and isinstance(signature.outputs[0], Partial):
                return True
        return False

    def stream(self, groups: Sequence[DimGroup]) -> None:
        """Keep whole the values that lead to the products that make the dims; also gradients."""
        along = {value for group in groups for value in group.by_value}
        makes = [use for group in groups for use in group.of(GroupRole.MAKES)]
        needed = {name for use in makes for name in use.activations}
        whole: set[str] = set()
        for node in reversed(self.graph.nodes):
            if node.phase is not Phase.FORWARD or not needed.intersection(node.outputs):
                continue
            needed.update(name for name in node.inputs() if name in self.found.shown.of_batch)
            if along.isdisjoint(node.outputs):
                self._pin_whole(node.outputs)
                if along.isdisjoint(node.inputs()):  # else gradients may have the dims
                    whole.add(node.name)
        # An operator may return gradients of activations and of parameters; the latter are split.
        shapes = {
            use.node.name: {self.graph.tensor(name).shape for name in use.activations}
            - {self.graph.tensor(name).shape for name in use.parameters}
            for use in makes
        }
        of_parameters = set(self.found.shown.made_of)
        partial: set[str] = set()
        for node in self.graph.nodes:
            if node.phase is Phase.BACKWARD:
                inputs = set(self.graph.tensor_inputs(node))
                if inputs and inputs <= of_parameters:
                    of_parameters.update(node.outputs)
                elif node.forward in shapes and inputs & of_parameters:
                    made = filter(self.graph.is_tensor, node.outputs)
                    own = shapes[node.forward]
                    partial.update(name for name in made if self.graph.tensor(name).shape in own)
                elif node.forward in whole or inputs & partial:
                    self._pin_gradients(node, partial)

    def features(self, groups: Sequence[DimGroup]) -> None:
        """Keep whole the values that the products over the dims take, in backward, too.

        There, a part of the samples would make a partial sum as large as the parameter.
        """
        for use in (use for group in groups for use in group.of(GroupRole.MAKES)):
            self._pin_whole(use.activations)

    def _pin_gradients(self, node: Node, partial: set[str]) -> None:
        """Pin the gradients that an operator takes, once they are complete and small.

        q, k and v contribute partial sums to the gradient of their input, which are added up before
        ranks exchange them. If that input was expanded, they are reduced before, too. A whole
        gradient that is added to partial sums, such as that of a residual connection, becomes one
        of them, which costs nothing, so it stays free. All other gradients are whole: an operator
        that split them would have its result gathered.

        Args:
            node: The operator.
            partial: Values that are partial sums; its results are added if they are, too.
        """
        makers = self.graph.producers
        gradients = [
            value
            for value in self.graph.tensor_inputs(node)
            if value in makers and makers[value].phase is Phase.BACKWARD
        ]
        if not partial.isdisjoint(gradients):
            adds_up = len(gradients) > 1 or self._shrinks(node, *gradients)
            if is_view(node.op) or (adds_up and self._passes_sums(node, *gradients)):
                free = [_literal(value) for value in gradients if value not in partial]
                self.pins.update(dict.fromkeys(free, "free"))
                partial.update(node.outputs)
                return
        self._pin_whole(gradients)

    def _shrinks(self, node: Node, value: str) -> bool:
        result = self.graph.tensor(node.outputs[0])
        return result.size_bytes < self.graph.tensor(value).size_bytes

    def _pin_whole(self, values: Sequence[str]) -> None:
        for value in filter(self.graph.is_tensor, values):
            if self.graph.tensor(value).dtype.startswith(("float", "bfloat")):
                self.pins.setdefault(_literal(value), "B")

    def values(self, groups: Sequence[DimGroup]) -> None:
        """Split batch inputs along dims, and each value of the batch whose users all take it.

        These pins override words for all activations, which split samples.

        If a value has two such dims, such as scores of queries and keys, inference chooses. A pin
        passes through views, so users of a view count for its base, too.
        """
        dims = [one for group in groups for one in group.dims]
        count = Counter(value for value, _ in dims)
        along = {value: dim for value, dim in dims if count[value] == 1}
        several = count.keys() - along.keys()
        split: set[str] = set()
        for node in reversed(self.graph.nodes):
            for value in node.outputs:
                users = self.graph.users[value]
                if value in along and all(
                    several.isdisjoint(user.outputs) and self._takes(user, value, along, split)
                    for user in users
                ):
                    split.add(value)
        for value, dim in along.items():
            is_input = value in self.graph.input_kinds
            if value in self.found.shown.of_batch and (is_input or value in split):
                self.pins[_literal(value)] = f"S({dim})"

    def _takes(self, user: Node, value: str, along: Mapping[str, int], split: set[str]) -> bool:
        """Whether an operator can take a value split, together with values that are split."""
        if is_view(user.op) and not split.issuperset(along.keys() & set(user.outputs)):
            return False
        call = OpCall.of(self.graph, user)
        return any(
            all(
                sbp == Split(along[name])
                for name, sbp in zip(call.tensor_names, signature.inputs, strict=True)
                if name == value or name in split
            )
            for signature in label_splits(
                call, self.found.size, self.found.before, self.found.shown.samples
            )
        )


def _described(pattern: str, graph: LogicalGraph, groups: Sequence[DimGroup]) -> str:
    """Return what a pattern splits, for people."""

    def names(*parts: GroupRole) -> str:
        uses = [use for group in groups for part in parts for use in group.of(part)]
        return ", ".join(parameter_names(uses))

    if pattern == "tensor":
        return f"columns {names(GroupRole.MAKES)}; rows {names(GroupRole.CONTRACTS)}"
    if pattern == "sequence":
        inputs = [(n, dim) for group in groups for n, dim in group.dims if n in graph.input_kinds]
        batch = [(n, dim) for n, dim in inputs if graph.input_kinds[n].kind is InputKind.BATCH]
        return ", ".join(f"dim {dim} of {name}" for name, dim in batch)
    return names(GroupRole.MAKES, GroupRole.LOOKS_UP, GroupRole.BATCHES)


def _literal(name: str) -> str:
    """Return a pattern that matches exactly one name."""
    return glob.escape(name)
