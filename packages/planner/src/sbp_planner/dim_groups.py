"""Group the tensor dims of a captured step that must be split together, to find parallelism.

A signature (a legal split of an operator's tensors) shows which dims belong together: if one is
split, so are the others. Over a whole forward pass they form groups, whatever the names of
modules and parameters:

    h = x @ up.T       x: n d     up: f d      h: n f         n, d and f are separate groups
    y = relu(h)        y: n f                                 f goes on
    z = y @ down.T     down: e f  z: n e                      f ends: it is summed away

A group ends where an operator needs a dim whole, such as a norm of a residual stream. Along a
group, a parameter has one of these roles in a product or a look-up (or it follows, as biases do):

    makes        up in f            the result has the dim, the activation has not      columns
    contracts    down in f          it is summed away                                   rows
    batches      experts in e       parameter, activation and result have it            experts
    looks up     table in v         integers of the batch choose rows of it             tables

Rows that integers of the batch choose in each part of a parameter count as a parameter: of a weight
(groups, rows, width), groups are split together with their rows (classes of Partial FC).

This module makes no plan: `sbp_planner.patterns` makes patterns of groups.

Source: Alabed et al., "TOAST: fast and scalable auto-partitioning based on principled static
analysis", arXiv:2508.15010, section 3 (named dimensions; here they follow from signatures).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import NamedTuple

from sbp_core.graph import InputKind, LogicalGraph, Node, Phase
from sbp_core.sbp import Partial, Sbp, Split
from sbp_core.signatures import OpCall, Signature1d, derivation, derive, work_flop

#: A dim of a value.
TensorDim = tuple[str, int]


class GroupRole(StrEnum):
    """The role of a parameter along a group; see the module's docstring."""

    MAKES = "makes"
    CONTRACTS = "contracts"
    BATCHES = "batches"
    LOOKS_UP = "looks up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of parameters along a group.

    Args:
        part: Their role.
        node: The product or look-up.
        parameters: Parameters that the node gets, through views and conversions.
        activations: Values of the batch that the node gets.
        flop: Work of the node, in floating-point operations.
    """

    part: GroupRole
    node: Node
    parameters: tuple[str, ...]
    activations: tuple[str, ...]
    flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DimGroup:
    """Dims that are split together.

    Args:
        dims: All of its dims, of inputs and of values of the forward pass, in graph order.
        uses: The uses of parameters along it, in graph order.
        ends: Values whose dim an operator needs whole, so that they would be gathered.
        is_reduced: Whether maxima are taken along it, as in a softmax in parts.
    """

    dims: tuple[TensorDim, ...]
    uses: tuple[Use, ...]
    ends: tuple[str, ...] = ()
    is_reduced: bool = False

    def of(self, part: GroupRole) -> tuple[Use, ...]:
        """Return the uses with one role."""
        return tuple(use for use in self.uses if use.part is part)

    @property
    def by_value(self) -> Mapping[str, int]:
        """The dim of each value."""
        return dict(self.dims)

    @property
    def is_consistent(self) -> bool:
        """Whether no value has two dims in the group, of which only one could be split."""
        return len(self.by_value) == len(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class DimGroups:
    """The groups of dims in the forward pass of a step.

    Args:
        groups: The groups, in graph order.
        made_of: For values that do not depend on the batch, and for rows of parameters that it
            chooses, the parameters they are made of.
        of_batch: The values that depend on the batch.
        samples: The leading dims of samples: (sample) or (sample, time).
    """

    groups: tuple[DimGroup, ...]
    made_of: Mapping[str, tuple[str, ...]]
    of_batch: frozenset[str]
    samples: frozenset[TensorDim]


def dim_groups(graph: LogicalGraph, num_ranks: int, num_before: int = 1) -> DimGroups:
    """Return the groups of the forward pass of a step.

    Args:
        graph: The step.
        num_ranks: Number of ranks over which dims are to be split. Whether an operator can take a
            split may depend on it, such as with 4 heads on 8 ranks.
        num_before: Number of ranks over which other mesh axes split samples before. With one
            sample on each, rows (sample, time) are split over times, as the dim of times is.

    Raises:
        SignatureError: an operator has no signatures.
    """
    found = _Groups(graph, num_ranks, num_before)
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and not node.is_host:
            found.add(node)
    return DimGroups(
        groups=tuple(found.groups()),
        made_of=found.made_of,
        of_batch=frozenset(found.of_batch),
        samples=frozenset(found.samples),
    )


def label_splits(
    call: OpCall, num_ranks: int, num_before: int = 1, samples: Collection[TensorDim] = ()
) -> Iterator[Signature1d]:
    """Yield, for each label of a call that can be split, the signature that splits only it.

    Args:
        call: The call.
        num_ranks: Number of ranks to split over.
        num_before: Number of ranks over which samples are split before; see `dim_groups`.
        samples: Leading dims of samples, which are split before.
    """
    behind: list[Signature1d] = []
    if num_before > 1:
        # Splits that are possible after samples, if each rank has one sample.
        found = derivation(call)
        leading = {
            signature.label
            for signature in found.legal
            if any(dim in samples for dim in _split_dims(call.tensor_names, signature.inputs))
        }
        behind = [
            signature
            for signature in found.behind
            if {label for label, _ in signature.follows} <= leading
            and prod(extent for _, extent in signature.follows) == num_before
        ]
    # A label that earlier axes have split down to one element is not split again.
    seen = {label for signature in behind for label, _ in signature.follows} | {""}
    for signature in (*derive(call, num_ranks), *behind):
        # Of several signatures that split a label, the first splits only that label.
        if signature.label not in seen:
            seen.add(signature.label)
            yield signature


class _LabelSplit(NamedTuple):
    """A signature that splits one label: the dims that it splits, and where."""

    dims: tuple[TensorDim, ...]
    parameters: tuple[str, ...]
    activations: tuple[str, ...]
    in_result: bool
    reduction: str


@dataclass(slots=True)
class _Groups:
    """Dims joined so far (a forest of disjoint sets), and the uses seen along them."""

    graph: LogicalGraph
    num_ranks: int
    num_before: int
    parent: dict[TensorDim, TensorDim] = field(default_factory=dict)
    uses: list[tuple[TensorDim, Use]] = field(default_factory=list)
    ends: list[TensorDim] = field(default_factory=list)
    reduced: list[TensorDim] = field(default_factory=list)
    #: The parameters that a value is made of, if it does not depend on the batch but for a choice.
    made_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: The values that depend on the batch.
    of_batch: set[str] = field(default_factory=set)
    #: The leading dims of samples.
    samples: set[TensorDim] = field(default_factory=set)

    def __post_init__(self) -> None:
        for entry in self.graph.inputs:
            if entry.kind is InputKind.BATCH:
                self.of_batch.add(entry.name)
                self.samples.add((entry.name, 0))
            elif entry.kind is InputKind.PARAMETER:
                self.made_of[entry.name] = (entry.name,)

    def root(self, dim: TensorDim) -> TensorDim:
        """Return the dim that represents the group of a dim."""
        while (above := self.parent.setdefault(dim, dim)) != dim:
            self.parent[dim] = self.parent[above]
            dim = above
        return dim

    def add(self, node: Node) -> None:
        """Join the dims of one operator, and record the roles of parameters in it."""
        call = OpCall.of(self.graph, node)
        names = call.tensor_names
        # Results depend on the batch, or else are made of parameters.
        activations = tuple(name for name in names if name in self.of_batch)
        splits = list(self._splits(call, node.outputs))
        if activations and not self._selects(activations, splits):
            self.of_batch.update(node.outputs)
        else:
            made_of = dict.fromkeys(one for name in names for one in self.made_of.get(name, ()))
            self.made_of.update(dict.fromkeys(node.outputs, tuple(made_of)))
        # Samples lead the dims of results that are split together with leading dims of samples.
        seen = {""}
        for signature in derivation(call).legal:
            if signature.label not in seen:
                seen.add(signature.label)
                if self.samples.intersection(_split_dims(names, signature.inputs)):
                    self.samples.update(_split_dims(node.outputs, signature.outputs))
        for split in splits:
            first = self.root(split.dims[0])
            for dim in split.dims[1:]:
                self.parent[self.root(dim)] = first
            if split.reduction == "max":
                self.reduced.append(first)
        joined = {dim for split in splits for dim in split.dims}
        for name in names:
            dims = ((name, dim) for dim in range(len(self.graph.tensor(name).shape)))
            self.ends += [dim for dim in dims if dim not in joined and dim in self.parent]
        if activations:
            self._note_uses(node, call, splits, activations)

    def _splits(self, call: OpCall, outputs: Sequence[str]) -> Iterator[_LabelSplit]:
        for signature in label_splits(call, self.num_ranks, self.num_before, self.samples):
            taken = _split_dims(call.tensor_names, signature.inputs)
            made = _split_dims(outputs, signature.outputs)
            if not taken and not made:
                continue
            partial = [one for one in signature.outputs if isinstance(one, Partial)]
            names = dict.fromkeys(name for name, _ in taken)
            yield _LabelSplit(
                dims=(*taken, *made),
                parameters=tuple(
                    name
                    for name in names
                    if self.made_of.get(name) and len(self.graph.tensor(name).shape) > 1
                ),
                activations=tuple(name for name in names if name in self.of_batch),
                in_result=bool(made),
                reduction=partial[0].reduction if partial else "",
            )

    def _selects(self, activations: tuple[str, ...], splits: Sequence[_LabelSplit]) -> bool:
        """Whether integers of the batch choose rows in each part of a parameter."""
        are_integers = all(self.graph.tensor(name).dtype == "int64" for name in activations)
        return are_integers and any(
            split.parameters and split.activations and split.in_result for split in splits
        )

    def _note_uses(
        self, node: Node, call: OpCall, splits: Sequence[_LabelSplit], activations: tuple[str, ...]
    ) -> None:
        is_product = any(
            split.parameters and split.activations and split.reduction and not split.in_result
            for split in splits
        )
        for split in splits:
            if not split.parameters:
                continue
            if not split.in_result and not split.activations:
                part = GroupRole.LOOKS_UP
            elif not is_product:
                continue
            elif not split.in_result:
                part = GroupRole.CONTRACTS
            else:
                part = GroupRole.BATCHES if split.activations else GroupRole.MAKES
            made_of = (one for name in split.parameters for one in self.made_of[name])
            use = Use(
                part=part,
                node=node,
                parameters=tuple(dict.fromkeys(made_of)),
                activations=activations,
                flop=work_flop(call),
            )
            self.uses.append((split.dims[0], use))

    def groups(self) -> Iterator[DimGroup]:
        """Yield the groups of several dims, or of one dim of a parameter that is used."""
        found: dict[TensorDim, tuple[list[TensorDim], list[Use], dict[str, None]]] = {}
        for dim in list(self.parent):
            found.setdefault(self.root(dim), ([], [], {}))[0].append(dim)
        for dim, use in self.uses:
            found[self.root(dim)][1].append(use)
        for dim in self.ends:
            found[self.root(dim)][2][dim[0]] = None
        reduced = {self.root(dim) for dim in self.reduced}
        for root, (dims, uses, ends) in found.items():
            yield DimGroup(
                dims=tuple(dims), uses=tuple(uses), ends=tuple(ends), is_reduced=root in reduced
            )


def _split_dims(names: Sequence[str], sbps: Sequence[Sbp]) -> list[TensorDim]:
    pairs = zip(names, sbps, strict=True)
    return [(name, sbp.dim) for name, sbp in pairs if isinstance(sbp, Split)]
