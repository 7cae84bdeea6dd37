"""Insert boxing, the collectives and transfers between layouts of a tensor, between operators.

This is the first step of the compiler: it makes a list of work items, the same for all ranks.

before: y = mm(x, w)                          x is made as (P), mm wants (B)
after:  x@0(B) = all-reduce(x); y = mm(x@0(B), w)

Conversions of one value to one target are shared by all their consumers. A sharded parameter is
gathered right before it is used, and again for the backward phase if `Strategy.regather` says so.
So no gathered copy lives longer than its use.
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
        cluster: The machine that decides which of two routes between stages is faster; without one,
            the route of fewer steps is taken.

    Raises:
        PlanError: the strategy does not cover the graph, or names a stage that does not exist; an
            output is an input itself; a host number is read from a tensor.
        SignatureError: an op may not be cut as in the strategy, or has no rule.
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
        # By value, stage, nd-SBP and `_apart_for`: the key of each boxed value so far.
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
        """Yield the keys under which a loss or metric leaves: whole, and once on every rank.

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
        """Return the key of `value` as (stage, sbp), adding the missing steps.

        The steps begin at the key `begin`, or at the SBP in which the value is made or stored.
        """
        held = self.out.held[begin or value]
        if held.stage == stage and held.sbp == sbp:
            return begin or value
        kind = self.graph.tensor(value)
        apart_for = self._apart_for(value, phase, rate)
        producer = self.graph.producers.get(value)
        is_gradient = producer is not None and producer.phase is Phase.BACKWARD
        # A gradient that the optimizer asks for would be boxed in its phase, after all gradients.
        # Boxed in the backward phase, as soon as it is made, it can overlap with the rest of that
        # phase, and the unreduced copy is freed sooner. With several micro-batches the sum is
        # boxed, once a step.
        if is_gradient and phase is Phase.OPTIMIZER and self.graph.rate_of(value) is Rate.MICRO:
            phase, rate = Phase.BACKWARD, Rate.MICRO
        source = (self.strategy.stages[held.stage], held.sbp)
        target = (self.strategy.stages[stage], sbp)
        # Each step of the route is shared separately, so routes with the same beginning share it:
        #
        #     x to (B, B), by way of (B, S0)    x -> x@0(B, S0) -> x@0(B, B)
        #     x to (B, S0)                      x -> x@0(B, S0)               no step of its own
        key, here = begin or value, held.stage
        found = fastest_route(kind.shape, kind.dtype, source, target, self.cluster)
        for step in found.steps:
            # A transfer may also lead to another nd-SBP on the stage where the value is.
            arrives = step.kind is StepKind.TRANSFER and step.target[0] == target[0]
            there = stage if arrives else here
            memo = (value, there, step.target[1], apart_for)
            there_is = self.boxed.get(memo)
            # A step that a later phase asked for first comes too late for an earlier node.
            if there_is and (
                not asked_by or PHASE_ORDER[self.phases[there_is]] <= PHASE_ORDER[phase]
            ):
                key, here = there_is, there
                continue
            made = f"{value}@{there}({step.target[1]})" + (f"!{apart_for}" if apart_for else "")
            # If the name is taken by that later step, the new step gets another. The new step is
            # earlier and takes its place in `boxed`: from here on it serves both phases.
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
        """Return the phase that a value is boxed separately for; empty if it is shared."""
        if is_gathered_on_use(self.graph, value):
            # Regathered: one copy for the forward phase and one for the backward phase, neither of
            # which lives in between. The optimizer never waits for, or keeps alive, the copy of
            # another phase.
            shared = phase is not Phase.OPTIMIZER and not self.strategy.is_regathered(value)
            return "" if shared else phase.value
        entry = self.graph.input_kinds.get(value)
        # A value that is boxed for each micro-batch cannot be read once a step.
        is_buffer = entry is not None and entry.kind is InputKind.BUFFER
        once = rate is not Rate.MICRO and (is_buffer or value in self.graph.carried)
        return rate.value if once else ""

    def _add(self, item: Item) -> None:
        if item.kind not in (ItemKind.OP, ItemKind.HOST):
            # It may continue from a boxing step that a later phase asked for first.
            before = (self.phases.get(key, item.phase) for key in item.inputs)
            phase = max((item.phase, *before), key=PHASE_ORDER.__getitem__)
            item = replace(item, phase=phase)
        self.phases |= dict.fromkeys(item.outputs, item.phase)
        self.out.items.append(item)


def _whole(stage: Placement) -> NdSbp:
    return NdSbp(*[B] * stage.num_axes)
