"""`StepWork`: a training step on given stages, as the search for shardings sees it.

It lists operator calls and prices; `Decision` holds the shardings that are chosen so far. This
module does not search: see `infer.solve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile.bucket_price import Companions
from sbp_core.cost import grid_time_s, is_free
from sbp_core.graph.ir import (
    GraphInput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    TensorType,
)
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.infer.companions import StepCompanions
from sbp_core.infer.prices import Prices
from sbp_core.infer.stages import StageMap
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Sbp, local_shape
from sbp_core.signatures.arguments import call_key
from sbp_core.signatures.axes import combine, continuations
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import work_flop
from sbp_core.signatures.signature import Signature1d
from sbp_core.strategy import Signature

#: (call as text, mesh shape, signatures on the axes before)
OptionKey = tuple[str, tuple[int, ...], tuple[Signature1d, ...]]


@dataclass(slots=True, eq=False)
class SharedTables:
    """Known prices and options, shared by steps on one machine that are planned in turn."""

    prices: dict[tuple[tuple[Placement, ...], range], Prices] = field(default_factory=dict)
    options: dict[tuple[tuple[Placement, ...], range], dict[OptionKey, Options]] = field(
        default_factory=dict
    )
    companions: dict[tuple[frozenset[StepKind], tuple[int, ...]], Companions] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step on given stages.

    Args:
        graph: The training step.
        placements: Placement of each stage; all have the same axes and mesh shape.
        stages: Stage of each node and input.
        cluster: Rates and links.
        bucket_bytes: Most bytes of the buckets that small tensors travel in; 0 for no buckets, None
            for the default of the prices.
        tables: Tables shared with other steps on the same cluster and with the same buckets, such
            as parts of one model.
        offloaded: States that are in host memory.
        whole: Companions in the larger step that this step is a part of; None if it is a whole
            step.
    """

    graph: LogicalGraph
    placements: tuple[Placement, ...]
    stages: StageMap
    cluster: Cluster
    bucket_bytes: int | None = None
    offloaded: frozenset[str] = frozenset()
    tables: SharedTables = field(default_factory=SharedTables, repr=False, compare=False)
    whole: StepCompanions | None = field(default=None, repr=False, compare=False)

    def prices(self, axes: range) -> Prices:
        """Return the prices of conversions on some mesh axes of the stages."""
        key = self.placements, axes
        if key not in self.tables.prices:
            self.tables.prices[key] = Prices(self.placements, axes, self.cluster, self.bucket_bytes)
        return self.tables.prices[key]

    @cached_property
    def companions(self) -> StepCompanions:
        """The companions of each value."""
        own = self.whole
        return own or StepCompanions(self.graph, self.stages, self.tables.companions)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that compute tensors, in graph order."""
        return tuple(node for node in self.graph.nodes if not node.is_host)

    @cached_property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The graph inputs that are tensors."""
        return tuple(e for e in self.graph.inputs if self.graph.is_tensor(e.name))

    @cached_property
    def calls(self) -> Mapping[str, OpCall]:
        """The call of each node that computes tensors."""
        return {node.name: OpCall.of(self.graph, node) for node in self.nodes}

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """A text for each node, equal for nodes whose calls mean the same."""
        return {name: call_key(call) for name, call in self.calls.items()}

    def is_free(self, node: Node) -> bool:
        """Return whether a node takes no time, as views do."""
        kind = self.kinds[node.name]
        if kind not in self._free:
            call = self.calls[node.name]
            self._free[kind] = is_free(call, work_flop(call))
        return self._free[kind]

    @cached_property
    def _free(self) -> dict[str, bool]:
        """By kind, whether nodes are free, filled when asked."""
        return {}

    @cached_property
    def views_of_gradients(self) -> frozenset[str]:
        """The views of the backward phase that only the optimizer, or an accumulation, uses."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            users = [user for value in node.outputs for user in self.graph.users[value]]
            ends_there = all(
                user.phase is Phase.OPTIMIZER or user.op == ACCUMULATE or user.name in found
                for user in users
            )
            if users and ends_there and node.phase is Phase.BACKWARD and self.is_free(node):
                found.add(node.name)
        return frozenset(found)

    def unsliced(self, value: str) -> tuple[TensorType, int]:
        """Return the tensor of which a value is a slice, and the number of slices; or itself, 1."""
        tensor, node = self.graph.tensor(value), self.graph.producers.get(value)
        slices = 1 if node is None else node.num_slices
        if slices == 1:
            return tensor, 1
        return replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] * slices)), slices

    def mesh_shape(self, stage: int) -> tuple[int, ...]:
        """Return the shape of the mesh of a stage."""
        return self.placements[stage].mesh_shape

    def mesh_shape_of(self, node: Node) -> tuple[int, ...]:
        """Return the shape of the mesh that a node runs on."""
        return self.mesh_shape(self.stages.nodes[node.name])

    def has_ranks(self, axis: int) -> bool:
        """Return whether any stage has several ranks along a mesh axis."""
        return any(stage.mesh_shape[axis] > 1 for stage in self.placements)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes of every stage."""
        return self.placements[0].axes

    def executions(self, rate: Rate) -> int:
        """Return how often a step does work of that rate."""
        return self.graph.repetitions[rate]

    @cached_property
    def states_by_value(self) -> Mapping[str, tuple[str, ...]]:
        """For each value that is the new value of tensor states: those states."""
        found: dict[str, list[str]] = {}
        for state, value in self.graph.new_states.items():
            if state in self.stages.inputs:
                found.setdefault(value, []).append(state)
        return {value: tuple(states) for value, states in found.items()}

    @cached_property
    def reported_values(self) -> frozenset[str]:
        """The tensors that the user sees whole: loss and metrics."""
        return frozenset(
            out.value
            for out in self.graph.outputs
            if out.kind is not OutputKind.STATE and self.graph.is_tensor(out.value)
        )

    @cached_property
    def parameter_of_state(self) -> Mapping[str, str]:
        """For each optimizer state of the shape of its parameter: the parameter."""
        return {
            entry.name: entry.of
            for entry in self.inputs
            if entry.kind is InputKind.OPTIMIZER_STATE
            and entry.of in self.stages.inputs
            and self.graph.tensor(entry.of).shape == self.graph.tensor(entry.name).shape
        }


@dataclass(slots=True, kw_only=True)
class Decision:
    """The decisions so far, one entry for each decided mesh axis."""

    nodes: dict[str, tuple[Signature1d, ...]] = field(default_factory=dict)
    storage: dict[str, tuple[Sbp, ...]] = field(default_factory=dict)

    def value(self, graph: LogicalGraph, value: str) -> tuple[Sbp, ...]:
        """Return the SBP in which a value is made or stored, on the decided axes."""
        node = graph.producers.get(value)
        if node is None:
            return self.storage[value]
        at = node.outputs.index(value)
        return tuple(part.outputs[at] for part in self.nodes[node.name])

    def signature(self, node: str) -> Signature:
        """Return the n-D signature of a node, once all axes are decided."""
        return combine(self.nodes[node])


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDecisions:
    """Decisions that stay fixed: signatures of nodes and SBPs of stored inputs, on all axes."""

    nodes: Mapping[str, Signature] = field(default_factory=dict)
    storage: Mapping[str, NdSbp] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The legal signatures of one call on some mesh axes, given the signatures on earlier axes.

    Args:
        parts: The signatures, each with an entry for each of the axes.
        seconds: Time of the call on the axes so far, under each signature.
    """

    parts: tuple[tuple[Signature1d, ...], ...]
    seconds: tuple[float, ...]


class OptionTable:
    """Finds the options of each node on successive mesh axes; equal calls share them."""

    def __init__(self, work: StepWork, axes: range) -> None:
        self._work, self._axes = work, axes
        self._found = work.tables.options.setdefault((work.placements, axes), {})

    def options(self, node: Node, before: tuple[Signature1d, ...]) -> Options:
        """Return the options of a node.

        Raises:
            SignatureError: the operator has no rule, or the rule does not fit.
        """
        mesh_shape = self._work.mesh_shape_of(node)[: self._axes.stop]
        key = (self._work.kinds[node.name], mesh_shape, before)
        if key not in self._found:
            call = self._work.calls[node.name]
            combined = tuple(self._extended(call, before, mesh_shape))
            flop, device = work_flop(call), self._work.cluster.device
            seconds = tuple(
                grid_time_s(call, combine(parts), mesh_shape, device, flop) for parts in combined
            )
            parts = tuple(one[self._axes.start :] for one in combined)
            self._found[key] = Options(parts=parts, seconds=seconds)
        return self._found[key]

    def _extended(
        self, call: OpCall, before: tuple[Signature1d, ...], mesh_shape: tuple[int, ...]
    ) -> Iterator[tuple[Signature1d, ...]]:
        """Yield every legal signature on all axes so far that begins with `before`."""
        if len(before) == len(mesh_shape):
            yield before
        elif not self._work.has_ranks(len(before)):
            # All SBPs mean the same there.
            yield from self._extended(call, (*before, replicated(call)), mesh_shape)
        else:
            for part in continuations(call, before, mesh_shape[: len(before) + 1]):
                yield from self._extended(call, (*before, part), mesh_shape)


def shard_shape(
    tensor: TensorType, sbp: Sequence[Sbp], mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the largest shard under the entries of the first `len(sbp)` axes."""
    num_axes = len(sbp)
    return local_shape(tensor.shape, NdSbp(*sbp), mesh_shape[:num_axes], (0,) * num_axes)


def smaller_shape(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with fewer elements."""
    return second if prod(second) < prod(first) else first


def replicated(call: OpCall) -> Signature1d:
    """Return the signature that splits nothing."""
    return Signature1d(
        inputs=(B,) * len(call.inputs), outputs=(B,) * len(call.outputs), origin="all B"
    )
