"""Insert boxing: from graph and strategy to a list of work items that is the same for all ranks.

before: y = mm(x, w)                          x is made as (P), mm wants (B)
after:  x@0(B) = all-reduce(x); y = mm(x@0(B), w)

Conversions of one value to one target are shared by all their consumers. A sharded parameter is
gathered right before it is used, and anew for the backward phase if `Strategy.regather` says so, so
that no gathered copy lives longer than its use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sbp_core.boxing import StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile.items import Item, ItemKind, KeyLayout, LoweredItems
from sbp_core.compile.legality import check_strategy
from sbp_core.compile.levels import is_gathered_on_use, with_levels
from sbp_core.cost import fastest_route
from sbp_core.errors import PlanError
from sbp_core.graph.ir import (
    PHASE_ORDER,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
)
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_core.strategy import Strategy


def lower(graph: LogicalGraph, strategy: Strategy, cluster: Cluster | None = None) -> LoweredItems:
    """Insert every boxing step that a legal strategy asks for.

    Args:
        graph: The step.
        strategy: How it is split.
        cluster: The machine that says which of two routes between stages is faster; without one,
            that of fewer steps is taken.

    Raises:
        PlanError: the strategy does not cover the graph, or names a stage that is not there; an
            output is an input itself; a host number is read from a tensor.
        SignatureError: an op may not be cut as the strategy says, or has no rule.
        SbpValueError: an SBP does not fit the shape of its tensor or the mesh.
    """
    check_strategy(graph, strategy)
    return _Lowering(graph, strategy, cluster).run()


class _Lowering:
    """The state of one lowering."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy, cluster: Cluster | None) -> None:
        self.graph, self.strategy, self.cluster = graph, strategy, cluster
        self.out = LoweredItems()
        self.phases: dict[str, Phase] = {}
        # By value, stage, nd-SBP and `_apart_for`: the key of what is boxed so already.
        self.boxed: dict[tuple[str, int, NdSbp, str], str] = {}
        for name, storage in strategy.storage.items():
            self.out.held[name] = KeyLayout(name, storage.stage, storage.sbp)

    def run(self) -> LoweredItems:
        for node in self.graph.nodes:
            if node.is_host:
                self._host(node)
            else:
                self._op(node)
        for out in self.graph.outputs:
            self._output(out)
        self.out.items = with_levels(self.graph, self.out.items)
        return self.out

    def _host(self, node: Node) -> None:
        if any(self.graph.is_tensor(value) for value in node.inputs()):
            raise PlanError(
                "a host number is read from a tensor in the middle of the step",
                where=node.where(),
                accepted="host numbers that come from scalars and step counters",
                todo="keep such optimizers' step counters as plain counters",
            )
        self._add_node(node, ItemKind.HOST, node.inputs(), 0)

    def _op(self, node: Node) -> None:
        assigned = self.strategy.nodes[node.name]
        # Boxed first, because their items must be before the node's. Host numbers among the inputs
        # keep their names, so the two kinds are merged in the order of the arguments.
        tensors = iter(
            self._box(value, assigned.stage, sbp, node.phase, node.rate, node.name)
            for value, sbp in zip(
                self.graph.tensor_inputs(node), assigned.signature.inputs, strict=True
            )
        )
        keys = tuple(
            next(tensors) if self.graph.is_tensor(value) else value for value in node.inputs()
        )
        for value, sbp in zip(node.outputs, assigned.signature.outputs, strict=True):
            self.out.held[value] = KeyLayout(value, assigned.stage, sbp)
        kind = ItemKind.ACCUMULATE if node.op == ACCUMULATE else ItemKind.OP
        self._add_node(node, kind, keys, assigned.stage)

    def _add_node(self, node: Node, kind: ItemKind, keys: tuple[str, ...], stage: int) -> None:
        self._add(
            Item(
                name=node.name,
                kind=kind,
                inputs=keys,
                outputs=node.outputs,
                stage=stage,
                target_stage=stage,
                phase=node.phase,
                rate=node.rate,
                node=node,
            )
        )

    def _output(self, out: GraphOutput) -> None:
        name, value = out.name, out.value
        producer = self.graph.producers.get(value)
        if producer is None:
            raise PlanError(
                f"output {name!r} is the input {value!r} itself",
                accepted="values that an op makes",
                todo="prepare the graph: sbp_aten.passes.prepare_step copies such inputs",
            )
        if not self.graph.is_tensor(value):
            self.out.new_states[name] = value
            return
        phase, rate = producer.phase, self.graph.rate_of(value)
        if out.kind is OutputKind.STATE:
            storage = self.strategy.storage[name]
            self.out.new_states[name] = self._box(value, storage.stage, storage.sbp, phase, rate)
        else:
            self.out.results[name] = tuple(self._result(value, phase, rate))

    def _result(self, value: str, phase: Phase, rate: Rate) -> Iterator[str]:
        """Yield the keys by which a loss or metric leaves: whole, and once on every rank.

        Made on the last of three stages, the first and the last of which are on the same rank:

            stage 2 (rank 0)    loss                     leaves here
            stage 1 (rank 1)    loss@1(B), a transfer    and here
            stage 0 (rank 0)    has it
        """
        stages, stage = self.strategy.stages, self.out.held[value].stage
        whole = self._box(value, stage, _whole(stages[stage]), phase, rate)
        yield whole
        reached = set(stages[stage].rank_list)
        for other, placement in enumerate(stages):
            if not reached.issuperset(placement.rank_list):
                reached.update(placement.rank_list)
                yield self._box(value, other, _whole(placement), phase, rate, begin=whole)

    def _box(
        self,
        value: str,
        stage: int,
        sbp: NdSbp,
        phase: Phase,
        rate: Rate,
        asked_by: str = "",
        *,
        begin: str = "",
    ) -> str:
        """Return the key of `value` as (stage, sbp), adding the steps that are still missing.

        They lead on from the key `begin`, or from how the value is made or stored.
        """
        held = self.out.held[begin or value]
        if held.stage == stage and held.sbp == sbp:
            return begin or value
        kind = self.graph.tensor(value)
        apart_for = self._apart_for(value, phase, rate)
        producer = self.graph.producers.get(value)
        is_gradient = producer is not None and producer.phase is Phase.BACKWARD
        # A gradient that the optimizer asks for would be boxed in its phase, when all gradients are
        # there. Boxed in the backward phase, as soon as it is made, it can overlap with the rest of
        # that, and the unreduced copy is freed sooner. Of several micro-batches the sum is boxed,
        # once a step.
        if is_gradient and phase is Phase.OPTIMIZER and self.graph.rate_of(value) is Rate.MICRO:
            phase, rate = Phase.BACKWARD, Rate.MICRO
        source = (self.strategy.stages[held.stage], held.sbp)
        target = (self.strategy.stages[stage], sbp)
        # Each step of the route is shared for itself, so routes that begin alike share their
        # beginning:
        #
        #     x to (B, B), by way of (B, S0)    x -> x@0(B, S0) -> x@0(B, B)
        #     x to (B, S0)                      x -> x@0(B, S0)               no step of its own
        key, here = begin or value, held.stage
        found = fastest_route(kind.shape, kind.dtype, source, target, self.cluster)
        for step in found.steps:
            # A transfer may also lead from one nd-SBP to another on the stage where the value is.
            arrives = step.kind is StepKind.TRANSFER and step.target[0] == target[0]
            there = stage if arrives else here
            memo = (value, there, step.target[1], apart_for)
            there_is = self.boxed.get(memo)
            # What a later phase was the first to ask for comes too late for a node before it.
            if there_is and (
                not asked_by or PHASE_ORDER[self.phases[there_is]] <= PHASE_ORDER[phase]
            ):
                key, here = there_is, there
                continue
            made = f"{value}@{there}({step.target[1]})" + (f"!{apart_for}" if apart_for else "")
            # The name is taken where the step is there already, but for a later phase. The new step
            # is the earlier one and takes its place in `boxed`: from here on it serves both phases.
            while made in self.out.held:
                made = f"{made}'"
            self.out.held[made] = KeyLayout(value, there, step.target[1])
            kinds = {StepKind.LOCAL: ItemKind.LOCAL, StepKind.TRANSFER: ItemKind.TRANSFER}
            kind_of_item = kinds.get(step.kind, ItemKind.COLLECTIVE)
            self._add(
                Item(
                    name=made,
                    kind=kind_of_item,
                    inputs=(key,),
                    outputs=(made,),
                    stage=here,
                    target_stage=there,
                    step=step,
                    phase=phase,
                    rate=rate,
                    asked_by=asked_by,
                )
            )
            self.boxed[memo] = made
            key, here = made, there
        return key

    def _apart_for(self, value: str, phase: Phase, rate: Rate) -> str:
        """Return for what a value is boxed apart from its other users; empty if for none."""
        if is_gathered_on_use(self.graph, value):
            # Regathered: a copy for the forward phase and one for the backward phase, neither of
            # which lives in between. The optimizer never waits for, or keeps alive, the copy of
            # another phase.
            shared = phase is not Phase.OPTIMIZER and not self.strategy.is_regathered(value)
            return "" if shared else phase.value
        entry = self.graph.input_kinds.get(value)
        # What is boxed for each micro-batch cannot be read once a step.
        is_buffer = entry is not None and entry.kind is InputKind.BUFFER
        once = rate is not Rate.MICRO and (is_buffer or value in self.graph.carried)
        return rate.value if once else ""

    def _add(self, item: Item) -> None:
        if item.kind not in (ItemKind.OP, ItemKind.HOST):
            # It may go on from a boxing step that a later phase was the first to ask for.
            before = (self.phases.get(key, item.phase) for key in item.inputs)
            phase = max((item.phase, *before), key=PHASE_ORDER.__getitem__)
            item = replace(item, phase=phase)
        self.phases |= dict.fromkeys(item.outputs, item.phase)
        self.out.items.append(item)


def _whole(stage: Placement) -> NdSbp:
    return NdSbp(*[B] * stage.num_axes)
