"""Find patterns of parallelism (tensor, experts, ...) among the `dim_groups` of a captured step.

    pattern     dims that it splits over a mesh axis                     what ranks exchange
    tensor      made by one parameter, contracted by a later one         sums after the latter,
                (heads, hidden units, channels)                          gradients before the former
    classes     made by a parameter, and a softmax in parts is taken     maxima and sums
                over them
    tables      rows of tables that the batch looks up                   the looked-up rows
    experts     the dim of stacked parameters along which each entry     tokens
                belongs to one expert
    sequence    times (or other dims but the first) of batch inputs      keys and values

Names play no role. Tensor parallelism chooses among dims that exclude each other, because a matrix
is split along one of its two dims. It prefers dims that send least for the work that they share:

    bytes(g) = results summed after + activations before it + bytes gathered where it ends
    work(g)  = flop of its products

So hidden units of an MLP (2 messages of n d for 4 n d f flop) come before the residual stream,
which every product makes or contracts. That is Megatron's choice, found for any model.

The pins that follow from the patterns are in `sbp_planner.pattern_pins`.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (tensor, classes, tables); Lepikhin et al.,
"GShard", 2021, section 3 (experts); Li et al., "Sequence parallelism", ACL 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp_core.errors import ConfigError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_planner.dim_groups import DimGroup, DimGroups, GroupRole, Use, dim_groups

#: Softmaxes that need all classes.
_WHOLE_SOFTMAXES = ("_log_softmax", "_softmax")

#: Pattern -> a description of its dims, for messages.
LOOKED_FOR = {
    "tensor": "dims that one parameter makes and a later one contracts, such as hidden units",
    "classes": "dims that a parameter makes, over which a cross-entropy is taken in parts",
    "tables": "tables of parameters that are larger than what a micro-batch looks up in them",
    "experts": "parameters of three or more dims, one of which gives every slice its own part",
    "sequence": "a dim of the batch but the first, along which products are taken row by row",
}


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """The patterns of one step on one mesh axis.

    Args:
        graph: The step.
        axis: Name of the mesh axis, for messages.
        size: Ranks along that axis.
        before: Ranks of the axes before it, which split samples.
        split: Values with a dim that is already split -> the pattern that splits it.
    """

    graph: LogicalGraph
    axis: str
    size: int
    before: int = 1
    split: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def shown(self) -> DimGroups:
        """The groups of dims of the graph."""
        return dim_groups(self.graph, self.size, self.before)

    def find(self, pattern: str, *, optional: bool = False) -> list[DimGroup]:
        """Return the groups that a pattern splits.

        Args:
            pattern: One of `LOOKED_FOR`.
            optional: Whether it may be missing: then the result is empty.

        Raises:
            ConfigError: it is not there, or other patterns split its tensors; names what was looked
                for, and what is there.
        """
        found = self._looked_for(pattern, self.split)
        if found or optional:
            return found
        if groups := self._looked_for(pattern, {}):
            values = [value for group in groups for value in group.by_value]
            earlier = {repr(self.split[value]): None for value in values if value in self.split}
            raise ConfigError(
                f"on the mesh axis {self.axis!r}, the pattern {', '.join(earlier)} splits the "
                f"tensors that the pattern {pattern!r} would split",
                where="planner.patterns",
                accepted="one of them on this axis",
                todo="leave one of them out, or split each over a mesh axis of its own",
            )
        others = [name for name in LOOKED_FOR if self._looked_for(name, self.split)]
        near = self._near(pattern)
        raise ConfigError(
            f"this model has no pattern {pattern!r} for {self.size} ranks of the mesh axis "
            f"{self.axis!r}, which is {LOOKED_FOR[pattern]}{near and '; ' + near}",
            where="planner.patterns",
            accepted=", ".join(others) and f"of this model: {', '.join(others)}",
            todo="choose another preset; planner=auto looks for what is fastest",
        )

    def _looked_for(self, pattern: str, split: Mapping[str, str]) -> list[DimGroup]:
        groups = [one for one in self.shown.groups if split.keys().isdisjoint(one.by_value)]
        if pattern == "tensor":
            # Sorting is stable: of equal groups, as in a chain of equal layers, the first is taken.
            return self._disjoint(sorted(filter(_is_pair, groups), key=self._bytes_per_flop))
        matches = {
            "classes": lambda group: group.is_reduced and _only_makes(group),
            "tables": lambda group: any(map(self._is_large_table, group.of(GroupRole.LOOKS_UP))),
            "experts": self._is_of_experts,
            "sequence": self._is_sequence,
        }[pattern]
        return self._disjoint(filter(matches, groups))

    @staticmethod
    def _disjoint(groups: Iterable[DimGroup]) -> list[DimGroup]:
        """Return the groups, in order, without those that share a value with an earlier group."""
        chosen: list[DimGroup] = []
        taken: set[str] = set()
        for group in groups:
            if taken.isdisjoint(group.by_value):
                taken.update(group.by_value)
                chosen.append(group)
        return chosen

    def _bytes_per_flop(self, group: DimGroup) -> float:
        makes, contracts = group.of(GroupRole.MAKES), group.of(GroupRole.CONTRACTS)
        moved = [use.node.outputs[0] for use in contracts]
        moved += dict.fromkeys(name for use in makes for name in use.activations)
        sizes = (self.graph.tensor(name).size_bytes for name in (*moved, *group.ends))
        return sum(sizes) / sum(use.flop for use in (*makes, *contracts))

    def _is_large_table(self, use: Use) -> bool:
        tables = [self.graph.tensor(name) for name in use.parameters]
        result = self.graph.tensor(use.node.outputs[0])
        return all(len(table.shape) == 2 for table in tables) and (
            sum(table.size_bytes for table in tables) > result.size_bytes
        )

    def _is_of_experts(self, group: DimGroup) -> bool:
        return not group.of(GroupRole.CONTRACTS) and any(
            len(self.graph.tensor(name).shape) > 2
            for part in (GroupRole.BATCHES, GroupRole.LOOKS_UP)
            for use in group.of(part)
            for name in use.parameters
        )

    def _is_sequence(self, group: DimGroup) -> bool:
        dims = [dim for name, dim in group.dims if name in self._batch]
        return bool(dims) and min(dims) > 0 and not group.uses and self._is_in_products(group)

    @cached_property
    def _batch(self) -> frozenset[str]:
        inputs = self.graph.inputs
        return frozenset(entry.name for entry in inputs if entry.kind is InputKind.BATCH)

    def _is_in_products(self, group: DimGroup) -> bool:
        """Whether activations that are multiplied by parameters have the dim."""
        return any(
            name in group.by_value
            for other in self.shown.groups
            for part in (GroupRole.MAKES, GroupRole.CONTRACTS)
            for use in other.of(part)
            for name in use.activations
        )

    def _near(self, pattern: str) -> str:
        """Return the nearest match for a pattern that is not there; empty if there is none."""
        uses = [use for group in self.shown.groups for use in group.uses]
        if pattern == "tensor":
            ended = (group for group in self.shown.groups if _only_makes(group))
            names = parameter_names(use for group in ended for use in group.of(GroupRole.MAKES))
            return _listed("dims that these make are contracted by no later parameter: ", names)
        if pattern == "tables":
            names = parameter_names(use for use in uses if use.part is GroupRole.LOOKS_UP)
            return _listed("these tables are not larger: ", names)
        if pattern == "classes":
            names = parameter_names(self._under_whole_softmaxes())
            how = "compile.passes.split_classes.when=always and fewer min_classes split it"
            return _listed(f"the softmax over these is a single operator ({how}): ", names)
        if pattern == "sequence":
            return (
                "where rows are (sample, time), times can be split if each rank of the axes before "
                f"has one sample of a micro-batch; those are {self.before}"
            )
        return ""

    def _under_whole_softmaxes(self) -> Iterator[Use]:
        for group in filter(_only_makes, self.shown.groups):
            users = (user for name in group.ends for user in self.graph.users[name])
            if any(user.kind in _WHOLE_SOFTMAXES for user in users):
                yield from group.of(GroupRole.MAKES)


def _only_makes(group: DimGroup) -> bool:
    return bool(group.of(GroupRole.MAKES)) and not group.of(GroupRole.CONTRACTS)


def _is_pair(group: DimGroup) -> bool:
    """Whether a parameter makes the dim, a later one contracts it, and nothing prevents a split."""
    makes, contracts = group.of(GroupRole.MAKES), group.of(GroupRole.CONTRACTS)
    if not makes or not contracts or group.of(GroupRole.LOOKS_UP) or not group.is_consistent:
        return False
    return group.uses.index(makes[0]) < group.uses.index(contracts[-1])


def parameter_names(uses: Iterable[Use]) -> list[str]:
    """Return the names of parameters, equal layers once: `blocks.*.mlp.up.weight`."""
    found: dict[str, None] = {}
    for use in uses:
        for name in use.parameters:
            *modules, last, key = ("", "", *name.split("."))
            layers = ("*" if part.isdigit() else part for part in modules if part)
            found[".".join((*layers, *filter(None, (last,)), key))] = None
    return list(found)


def _listed(what: str, names: Sequence[str]) -> str:
    return what + ", ".join(names) if names else ""


def by_axis(patterns: Mapping[str, Sequence[str]], axis: str) -> Sequence[str]:
    """Return the patterns of a mesh axis; `*` means every axis that is not named."""
    return patterns.get(axis, patterns.get("*", ()))
