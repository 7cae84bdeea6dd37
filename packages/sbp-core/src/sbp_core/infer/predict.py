"""Predict the cost of a strategy: time, bytes and memory of one step, from routes and signatures.

    step time    sum_i m_i + (M - 1) max_i m_i + max_i s_i                              [s]

with M micro-batches, m_i the time of stage i for one micro-batch (forward and backward) and s_i its
time for work done once a step. The time of a stage is the time of its ops and of the boxing that
ends on it, in buckets as the compiler forms them, one after the other (no overlap). With one stage
this is M m + s, the same as `sbp_core.simulation` computes for the compiled plan without overlap.
The simulation also models overlap and pipelines, so it is used wherever there is a plan.

    memory of a rank of stage i    states + updates + gathered + gradients + q_i activations
                                   + working set                                        [B]

* states: parameters, buffers and optimizer states as they are stored;
* updates: new values that are kept next to the old ones until the step is done: all new values that
  the forward phase makes, and with `in_place_states=False` all others, too;
* gathered: the largest copy of a state in another SBP than the stored one, held while it is used;
* gradients: what the backward phase makes for the optimizer, and accumulated values next to it;
* activations: what one micro-batch's forward pass leaves for its backward pass (views count as
  the tensors they view), q_i = `in_flight[i]` of them;
* working set: the largest arguments and results of one op.

All for the rank that holds the most, as if all of it were alive at once: an estimate. The memory
that is compared with a limit comes from lifetimes (`sbp_core.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbp_core.boxing.step import BoxingStep
from sbp_core.cluster import Cluster
from sbp_core.compile.buckets import bucket
from sbp_core.compile.commit import commit_step
from sbp_core.compile.items import Item
from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.compile.lowering import lower
from sbp_core.compile.program import LoweredProgram
from sbp_core.compile.segments import CompileOptions
from sbp_core.cost import boxing_step_time_s, is_free, local_bytes
from sbp_core.graph.ir import LogicalGraph, Node, OutputKind, Phase, Rate
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import work_flop
from sbp_core.strategy import Strategy

#: A place and an nd-SBP there: (stage, nd-SBP).
StagedSbp = tuple[int, NdSbp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One boxing that a strategy asks for.

    Args:
        value: Name of the value.
        source, target: (stage, nd-SBP).
        rate: How often it is boxed.
        users: The nodes that use the result; empty for states, loss and metrics.
    """

    value: str
    source: StagedSbp
    target: StagedSbp
    rate: Rate
    users: tuple[Node, ...]


@dataclass(slots=True, kw_only=True)
class StagePrediction:
    """The work of one stage; times in seconds, memory in bytes on its fullest rank."""

    micro_compute_s: float = 0.0
    micro_boxing_s: float = 0.0
    step_compute_s: float = 0.0
    step_boxing_s: float = 0.0
    states_bytes: int = 0
    updates_bytes: int = 0
    gathered_bytes: int = 0
    gradients_bytes: int = 0
    activations_bytes: int = 0
    working_bytes: int = 0

    def add_time(self, item: Item, seconds: float) -> None:
        """Add the time of one item."""
        is_micro, is_compute = item.rate is Rate.MICRO, item.node is not None
        if is_micro and is_compute:
            self.micro_compute_s += seconds
        elif is_micro:
            self.micro_boxing_s += seconds
        elif is_compute:
            self.step_compute_s += seconds
        else:
            self.step_boxing_s += seconds

    @property
    def micro_s(self) -> float:
        """Time of one micro-batch."""
        return self.micro_compute_s + self.micro_boxing_s

    @property
    def step_s(self) -> float:
        """Time of the work that is done once a step."""
        return self.step_compute_s + self.step_boxing_s

    def memory_bytes(self, in_flight: int) -> int:
        """Return the memory with that many micro-batches between forward and backward."""
        once = self.states_bytes + self.updates_bytes + self.gathered_bytes + self.gradients_bytes
        return once + self.working_bytes + in_flight * self.activations_bytes


def source_of(graph: LogicalGraph, strategy: Strategy, value: str) -> StagedSbp:
    """Return the stage and the nd-SBP in which a value is made or stored."""
    node = graph.producers.get(value)
    if node is None:
        return strategy.storage[value].stage, strategy.storage[value].sbp
    found = strategy.nodes[node.name]
    return found.stage, found.signature.outputs[node.outputs.index(value)]


def conversions(graph: LogicalGraph, strategy: Strategy) -> Iterator[Conversion]:
    """Yield every boxing that a strategy asks for, each distinct target once.

    The copies of losses and metrics for the ranks of other stages are not among them.
    """
    # A value has three kinds of targets: the inputs of ops, the storage of a state whose new value
    # it is, and the whole tensor for a loss or metric. Equal targets are one boxing.
    states: dict[str, list[str]] = {}
    reported: set[str] = set()
    for out in graph.outputs:
        if out.kind is OutputKind.STATE:
            states.setdefault(out.value, []).append(out.name)
        else:
            reported.add(out.value)
    for value in graph.types:
        if not graph.is_tensor(value):
            continue
        source = source_of(graph, strategy, value)
        targets: dict[StagedSbp, list[Node]] = {}
        for user in graph.users[value]:
            if user.is_host:
                continue
            found = strategy.nodes[user.name]
            names = graph.tensor_inputs(user)
            for name, sbp in zip(names, found.signature.inputs, strict=True):
                # An op may take a value twice, in different SBPs.
                if name == value and user not in targets.setdefault((found.stage, sbp), []):
                    targets[found.stage, sbp].append(user)
        for state in states.get(value, ()):
            targets.setdefault((strategy.storage[state].stage, strategy.storage[state].sbp), [])
        if value in reported:
            targets.setdefault((source[0], NdSbp(*[B] * len(source[1]))), [])
        for target, users in targets.items():
            if target != source:
                yield Conversion(
                    value=value,
                    source=source,
                    target=target,
                    rate=graph.rate_of(value),
                    users=tuple(users),
                )


def predict_stages(
    graph: LogicalGraph, strategy: Strategy, cluster: Cluster, options: CompileOptions | None = None
) -> tuple[tuple[StagePrediction, ...], int]:
    """Return the work of each stage, and the bytes that a step moves between ranks.

    Times are times of the compiled items: small tensors are boxed in buckets.
    """
    stages = tuple(StagePrediction() for _ in strategy.stages)
    in_place = (options or CompileOptions()).in_place_states
    for node in graph.nodes:
        if not node.is_host:
            _add_op(graph, strategy, node, stages)
    for name, storage in strategy.storage.items():
        if graph.input_kinds[name].kind.is_state and not storage.offloaded:
            mesh_shape = strategy.stages[storage.stage].mesh_shape
            size = local_bytes(graph.tensor(name), storage.sbp, mesh_shape)
            stages[storage.stage].states_bytes += size
            if name in graph.new_states and not (in_place and _is_update(graph, name)):
                stages[storage.stage].updates_bytes += size
    _add_activations(graph, strategy, stages)
    moved = 0
    # Lowered twice: bytes and memory belong to logical values, which the items of plain lowering
    # still have; times belong to flat buffers, whose items name no value.
    lowered = lower(graph, strategy, cluster)
    # A boxed forward value is a separate activation only if the backward phase uses it in that SBP:
    # otherwise it is freed in the forward phase.
    used_backward = {
        key for item in lowered.items if item.phase is Phase.BACKWARD for key in item.inputs
    }
    for item in lowered.items:
        if item.step is not None:
            is_kept = not used_backward.isdisjoint(item.outputs)
            value = lowered.held[item.outputs[0]].value
            moved += _add_boxing(graph, item, item.step, value, stages, is_kept=is_kept)
    bucket_bytes = (options or CompileOptions()).most_bucket_bytes(strategy)
    bucketed = bucket(graph, lowered, bucket_bytes, cluster)
    program = LoweredProgram(graph, strategy, bucketed, cluster)
    for item in bucketed.items:
        updates = graph.num_updates if item.rate is Rate.UPDATE else 1
        stages[item.target_stage].add_time(item, updates * program.time_s(item))
    commit = commit_step(strategy.stages) if graph.new_states else None
    if commit is not None:
        moved += commit.size_bytes
        for stage in stages:  # all take part at once
            stage.step_boxing_s += boxing_step_time_s(commit, cluster)
    return stages, moved


def _is_update(graph: LogicalGraph, state: str) -> bool:
    """Whether the optimizer makes the new value of a state, which it then writes over the old."""
    producer = graph.producers.get(graph.new_states[state])
    return producer is not None and producer.phase is Phase.OPTIMIZER


def _add_op(
    graph: LogicalGraph, strategy: Strategy, node: Node, stages: tuple[StagePrediction, ...]
) -> None:
    found = strategy.nodes[node.name]
    stage, mesh = stages[found.stage], strategy.stages[found.stage]
    call = OpCall.of(graph, node)
    made = sum(
        local_bytes(tensor, sbp, mesh.mesh_shape)
        for tensor, sbp in zip(call.outputs, found.signature.outputs, strict=True)
    )
    read = sum(
        local_bytes(tensor, sbp, mesh.mesh_shape)
        for tensor, sbp in zip(call.inputs, found.signature.inputs, strict=True)
    )
    stage.working_bytes = max(stage.working_bytes, made + read)
    if node.op == ACCUMULATE:
        stage.gradients_bytes += made
    elif node.phase is Phase.BACKWARD:
        # No update begins before all gradients are there.
        stage.gradients_bytes += sum(
            local_bytes(tensor, sbp, mesh.mesh_shape)
            for value, tensor, sbp in zip(
                node.outputs, call.outputs, found.signature.outputs, strict=True
            )
            if any(
                user.phase is Phase.OPTIMIZER or user.op == ACCUMULATE
                for user in graph.users[value]
            )
        )


def _add_activations(
    graph: LogicalGraph, strategy: Strategy, stages: tuple[StagePrediction, ...]
) -> None:
    """Count the forward values that backward nodes use; a view counts as its base."""
    kept: set[str] = set()
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            kept.update(_base(graph, value) for value in graph.tensor_inputs(node))
    for value in kept:
        producer = graph.producers.get(value)
        if producer is not None and producer.phase is Phase.FORWARD:
            stage, sbp = source_of(graph, strategy, value)
            mesh_shape = strategy.stages[stage].mesh_shape
            stages[stage].activations_bytes += local_bytes(graph.tensor(value), sbp, mesh_shape)


def _base(graph: LogicalGraph, value: str) -> str:
    while (node := graph.producers.get(value)) is not None:
        call = OpCall.of(graph, node)
        if not call.inputs or not is_free(call, work_flop(call)):
            break
        value = call.tensor_names[0]
    return value


def _add_boxing(
    graph: LogicalGraph,
    item: Item,
    step: BoxingStep,
    value: str,
    stages: tuple[StagePrediction, ...],
    *,
    is_kept: bool,
) -> int:
    """Add one boxing step of the plan; return the bytes that it moves in a step.

    `value` is the boxed value; `is_kept` says whether the backward phase uses the result.
    """
    stage = stages[item.target_stage]
    size = local_bytes(graph.tensor(value), step.target[1], step.target[0].mesh_shape)
    producer = graph.producers.get(value)
    is_state = producer is None and graph.input_kinds[value].kind.is_state
    # A gathered parameter is held while it is used, one at a time, so the largest counts. A boxed
    # activation waits for the backward phase next to all others, so they add up. A local step of a
    # state (`size_bytes` 0) returns a part of the stored value.
    if (is_state or is_gathered_on_use(graph, value)) and step.size_bytes:
        stage.gathered_bytes = max(stage.gathered_bytes, size)
    elif producer is not None and producer.phase is Phase.FORWARD and is_kept:
        stage.activations_bytes += size
    return step.size_bytes * graph.repetitions[item.rate]


def predict_cost(
    graph: LogicalGraph, strategy: Strategy, cluster: Cluster, options: CompileOptions | None = None
) -> Mapping[str, Any]:
    """Predict time, bytes sent and memory of a step under a strategy, as plain values.

    Args:
        graph: The step.
        strategy: The strategy.
        cluster: Rates and links.
        options: The options of its compilation; the compiler's defaults if None.

    Returns:
        `predicted_step_s`, `predicted_boxing_bytes` (all ranks), `predicted_memory_bytes_per_rank`
        (the fullest rank), and `predicted_by_stage` with the parts of each.
    """
    stages, moved = predict_stages(graph, strategy, cluster, options)
    micro = [stage.micro_s for stage in stages]
    # The first micro-batch goes through all stages; each further one takes the time of the slowest
    # stage. See the module's docstring.
    step_s = sum(micro) + (graph.num_micro_batches - 1) * max(micro)
    step_s += max(stage.step_s for stage in stages)
    memory = [
        stage.memory_bytes(quota) for stage, quota in zip(stages, strategy.in_flight, strict=True)
    ]
    return {
        "predicted_step_s": step_s,
        "predicted_boxing_bytes": moved,
        "predicted_memory_bytes_per_rank": max(memory),
        "predicted_by_stage": [
            {
                "micro_compute_s": stage.micro_compute_s,
                "micro_boxing_s": stage.micro_boxing_s,
                "step_compute_s": stage.step_compute_s,
                "step_boxing_s": stage.step_boxing_s,
                "memory_bytes": size,
                "states_bytes": stage.states_bytes,
                "updates_bytes": stage.updates_bytes,
                "gathered_bytes": stage.gathered_bytes,
                "gradients_bytes": stage.gradients_bytes,
                "activations_bytes": stage.activations_bytes,
                "working_bytes": stage.working_bytes,
            }
            for stage, size in zip(stages, memory, strict=True)
        ],
    }
