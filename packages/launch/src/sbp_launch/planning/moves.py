"""Assign each boxing step (collective or transfer) of a plan to a module, and a time around it.

The printed plan shows both (`rows`). The compiler boxes a value for the op that needs it first,
which is often a view. A reader wants to know which module's tensor is boxed:

    mlp.down:  addmm -> (S(0), P)   view   | all-reduce |   add of the residual stream
               after the forward of mlp.down: its output is summed

    norm (gradient whole)  <- | all-gather | <-  mm of head's backward, S(1)
               before the backward of norm: the gradient of its output is gathered

A view belongs to the module of its base. A reduction of partial sums belongs to the module that
made them, other boxing to the module that needs it; or to the only one of the two without children.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import LoweredItems
from sbp_core.cost import boxing_step_time_s
from sbp_core.graph import GraphInput, InputKind, LogicalGraph, Node, Phase
from sbp_core.placement import Placement
from sbp_core.sbp import Partial
from sbp_core.signatures import is_view
from sbp_core.units import format_ranges


class MoveTime(StrEnum):
    """Whether a tensor is boxed before, within or after a phase of its module."""

    BEFORE = "before"
    WITHIN = "within"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One boxing step between ranks, and the module that it belongs to.

    Args:
        stage: The stage whose ranks send.
        module: Path of the module; empty for the model itself.
        when, phase: Before, within or after the forward, backward or update of the module.
        what: The kind of tensor: `parameter`, `output gradient`, ...
        kind: The collective, or a transfer.
        how: Axes and change of SBP: `over tensor: P -> B`.
        value: The value that is boxed.
        sent_bytes: Bytes that all ranks together send in a training step.
        time_s: Its time in a training step without any overlap, in seconds.
        num_ranks: Number of ranks that send.
        target: The resulting SBP.
    """

    stage: int
    module: str
    when: MoveTime
    phase: Phase
    what: str
    kind: StepKind
    how: str
    value: str
    sent_bytes: int
    time_s: float
    num_ranks: int
    target: str


def moves(graph: LogicalGraph, lowered: LoweredItems, cluster: Cluster) -> Iterator[Move]:
    """Yield every boxing step between ranks, in the order in which they are inserted.

    Args:
        graph: The planned graph.
        lowered: The result of `lower` for the graph and its strategy.
        cluster: The machine.
    """
    times_s: dict[BoxingStep, float] = {}
    owners = _Owners(graph)
    outputs = {key: name for name, key in lowered.new_states.items()}
    outputs |= {key: name for name, keys in lowered.results.items() for key in keys}
    for item in lowered.items:
        step = item.step
        if step is None or step.kind is StepKind.LOCAL:
            continue
        value = lowered.held[item.outputs[0]].value
        repeats = graph.repetitions[item.rate]
        if step not in times_s:  # equal layers have equal boxing steps
            times_s[step] = boxing_step_time_s(step, cluster)
        if item.asked_by:
            sums = any(
                isinstance(old, Partial) and not isinstance(new, Partial)
                for old, new in zip(step.source[1], step.target[1], strict=False)
            )
            leaves_stage = item.stage != item.target_stage
            taker = graph.by_name[item.asked_by]
            module, when, phase, what = owners.of(value, taker, sums=sums, leaves=leaves_stage)
        else:
            name = outputs.get(item.outputs[0], value)
            module, when, phase, what = owners.of_output(value, name)
        yield Move(
            stage=item.stage,
            module=module,
            when=when,
            phase=phase,
            what=what,
            kind=step.kind,
            how=_how(step, item.target_stage if item.target_stage != item.stage else None),
            value=value,
            sent_bytes=repeats * step.size_bytes,
            time_s=repeats * times_s[step],
            num_ranks=step.source[0].size,
            target=str(step.target[1]),
        )


class _Owners:
    """Finds the module to which the boxing of a value between two ops belongs."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        paths = {node.module for node in graph.nodes}
        # For `blocks.0.up`: `blocks.0`, `blocks` and the model itself have children.
        self.parents = {""} | {
            ".".join(parts[:end])
            for parts in (path.split(".") for path in paths)
            for end in range(1, len(parts))
        }

    def of(
        self, value: str, taker: Node, *, sums: bool, leaves: bool
    ) -> tuple[str, MoveTime, Phase, str]:
        """Return `module`, `when`, `phase` and `what` for a value that is boxed for a node.

        Args:
            value: The boxed value.
            taker: The first node that needs it.
            sums: Whether the boxing reduces partial sums.
            leaves: Whether the value goes to another stage.
        """
        maker, entry = self._maker(value)
        if entry is not None:
            return self._of_input(entry, taker, leaves=leaves)
        assert maker is not None, "a value is an input or made by a node"
        if taker.phase is Phase.OPTIMIZER:
            if maker.phase is Phase.OPTIMIZER:
                return updated_module(taker), MoveTime.WITHIN, Phase.OPTIMIZER, "value"
            return maker.module, MoveTime.BEFORE, Phase.OPTIMIZER, "gradient"
        taker = self._taker(taker)
        is_saved = maker.phase is not taker.phase
        if leaves:
            what = "output" if maker.phase is Phase.FORWARD else "input gradient"
            return maker.module, MoveTime.AFTER, maker.phase, what
        if is_saved:
            return taker.module, MoveTime.BEFORE, taker.phase, "saved activation"
        is_forward = maker.phase is Phase.FORWARD
        if maker.module == taker.module:
            # The taker may be an addition of the gradient of a residual connection, or a division
            # of a sum of losses by their number: they count as the module's, but end it.
            if not sums or self._goes_on(taker):
                return maker.module, MoveTime.WITHIN, maker.phase, "intermediate"
            belongs_to_maker = True
        else:
            inner = [node.module not in self.parents for node in (maker, taker)]
            belongs_to_maker = inner[0] if inner[0] != inner[1] else sums
        if belongs_to_maker:
            what = "output" if is_forward else "input gradient"
            return maker.module, MoveTime.AFTER, maker.phase, what
        what = "input" if is_forward else "output gradient"
        return taker.module, MoveTime.BEFORE, maker.phase, what

    def of_output(self, value: str, name: str) -> tuple[str, MoveTime, Phase, str]:
        """Return the same for a value that is boxed as the loss, a metric or a new state."""
        producer = self.graph.producers[value]
        if name not in self.graph.new_states:
            return producer.module, MoveTime.AFTER, producer.phase, name
        entry = self.graph.input_kinds[name]
        kind = entry.kind.value.replace("_", " ")
        return owner_of(entry), MoveTime.AFTER, producer.phase, f"new {kind}"

    def _of_input(
        self, entry: GraphInput, taker: Node, *, leaves: bool
    ) -> tuple[str, MoveTime, Phase, str]:
        if entry.kind is InputKind.BATCH:
            return self._taker(taker).module, MoveTime.BEFORE, taker.phase, entry.name
        what = entry.kind.value.replace("_", " ")
        # A tensor for another stage is sent by the stage that stores it.
        if leaves or taker.phase is Phase.OPTIMIZER:
            return owner_of(entry), MoveTime.BEFORE, taker.phase, what
        return self._taker(taker).module, MoveTime.BEFORE, taker.phase, what

    def _maker(self, value: str) -> tuple[Node | None, GraphInput | None]:
        """Return the node that makes the tensor that a value views, or its graph input."""
        while (node := self.graph.producers.get(value)) is not None:
            tensors = self.graph.tensor_inputs(node)
            if not is_view(node.op) or not tensors:
                return node, None
            before = self.graph.producers.get(tensors[0])
            # A view in the backward phase of a forward tensor belongs to the backward phase.
            if before is not None and before.phase is not node.phase:
                return node, None
            value = tensors[0]
        return None, self.graph.input_kinds[value]

    def _goes_on(self, node: Node) -> bool:
        """Whether a node's module computes with its result in the same phase."""
        users = (self._taker(user) for value in node.outputs for user in self.graph.users[value])
        return any((user.module, user.phase) == (node.module, node.phase) for user in users)

    def _taker(self, node: Node) -> Node:
        """Return the node; if it is a view, the first node of its phase that computes with it."""
        while is_view(node.op):
            users = (user for value in node.outputs for user in self.graph.users[value])
            after = next((user for user in users if user.phase is node.phase), None)
            if after is None:
                return node
            node = after
        return node


def owner_of(entry: GraphInput) -> str:
    """Return the module of a state; for an optimizer state, the module of its parameter."""
    return (entry.of or entry.name).rpartition(".")[0]


def updated_module(node: Node) -> str:
    """Return the module of the parameter that a node of the update belongs to."""
    parameter, is_update, _ = node.name.partition(".update.")
    return parameter.rpartition(".")[0] if is_update else node.module


def _how(step: BoxingStep, target_stage: int | None) -> str:
    """Return axes and change of a step: `over data, tensor: P -> S(0)`."""
    if target_stage is not None:
        return f"to stage {target_stage} ({ranks_text(step.target[0])})"
    before, after = step.source[1], step.target[1]
    axes = step.axes or tuple(
        axis for axis, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]
    )
    names = ", ".join(step.source[0].axes[axis] for axis in axes)
    change = [", ".join(dict.fromkeys(str(sbp[axis]) for axis in axes)) for sbp in (before, after)]
    return f"over {names}: {change[0]} -> {change[1]}"


def ranks_text(placement: Placement) -> str:
    """Return the ranks of a placement: `ranks 0-3`."""
    ranks = placement.rank_list
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_ranges(ranks)}"
