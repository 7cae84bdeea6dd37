"""Estimate time and memory of each parameter, replicated or sharded, to guide the planner `osdp`.

With N ranks on one mesh axis, S bytes of a parameter on a rank if it is not sharded on that axis
(what the other axes leave of it), M micro-batches in a step:

    resident     replicated   parameter + gradient + optimizer states (4 S for AdamW)        [B]
                 sharded      the same for the first rank's shard, ceil(n / N) of n rows
                 offloaded states are left out in both
    transient    sharded      2 S while it is used: the gathered parameter and its gradient  [B]
    seconds      either       its gathers, the boxing of its gradient and new values, and its
                              update, priced by `sbp_core.cost` as the strategies do them;
                              copies of offloaded states, in one direction                   [s]

The sums over parameters give the order in which choices are tried. They are not predictions:
tensors in one bucket share the latency, and memory depends on lifetimes.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3 (there with a ring's α-β prices for the communication).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sbp_core.cluster import Cluster
from sbp_core.compile import lower
from sbp_core.cost import boxing_step_time_s, host_copy_time_s, op_time_s
from sbp_core.graph import GraphInput, InputKind, LogicalGraph, Phase
from sbp_core.sbp import local_shape
from sbp_core.signatures import OpCall
from sbp_core.strategy import Strategy
from sbp_planner.knapsack import KnapsackOption

#: Indices of the options of a parameter.
REPLICATED, SHARDED = 0, 1


def shardable(graph: LogicalGraph) -> tuple[str, ...]:
    """Return the parameters that have a dim 0 to shard."""
    return tuple(
        entry.name
        for entry in graph.inputs
        if entry.kind is InputKind.PARAMETER and graph.tensor(entry.name).shape
    )


def states_of(graph: LogicalGraph, name: str) -> list[GraphInput]:
    """Return the optimizer states of a parameter that have its shape."""
    shape = graph.tensor(name).shape
    return [
        entry
        for entry in graph.inputs
        if entry.of == name
        and graph.is_tensor(entry.name)
        and graph.tensor(entry.name).shape == shape
    ]


def update_values(graph: LogicalGraph) -> dict[str, list[str]]:
    """Return, for each parameter, the values of its shape that its update alone uses or makes.

    An optimizer node belongs to the parameter whose states it reads, also through other nodes.
    """
    owner: dict[str, str] = {}
    for entry in graph.inputs:
        if entry.kind is InputKind.PARAMETER:
            owner[entry.name] = entry.name
        elif entry.kind is InputKind.OPTIMIZER_STATE:
            owner[entry.name] = entry.of
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        if node.phase is not Phase.OPTIMIZER or node.is_host:
            continue
        used = graph.tensor_inputs(node)
        owners = {owner[value] for value in used if value in owner}
        if len(owners) != 1:
            continue
        name = owners.pop()
        for value in node.outputs:
            owner[value] = name
        for value in (*used, *node.outputs):
            inner = value not in graph.input_kinds and owner.get(value, name) == name
            if inner and graph.tensor(value).shape == graph.tensor(name).shape:
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def owners(graph: LogicalGraph, names: Sequence[str]) -> dict[str, str]:
    """Return the parameter that a value belongs to: itself, its states, gradient and update.

    Args:
        graph: The step.
        names: The parameters.
    """
    found: dict[str, str] = {}
    updates = update_values(graph)
    for name in names:
        states = [entry.name for entry in states_of(graph, name)]
        found |= dict.fromkeys((name, *states, *updates.get(name, ())), name)
        for value in updates.get(name, ()):
            node = graph.producers.get(value)
            if node is not None and node.op == "sbp.accumulate":
                # The gradient may also be boxed before it is accumulated.
                found |= dict.fromkeys(graph.tensor_inputs(node), name)
    return found


def parameter_options(
    graph: LogicalGraph,
    names: Sequence[str],
    cluster: Cluster,
    *,
    replicated: Strategy,
    sharded: Strategy,
) -> tuple[tuple[KnapsackOption, KnapsackOption], ...]:
    """Return the cost of each parameter as two options: replicated, and sharded.

    Args:
        graph: The step.
        names: The parameters.
        cluster: The machine.
        replicated: The strategy that replicates all of them.
        sharded: The strategy that shards all of them.
    """
    owner = owners(graph, names)
    seconds = [_seconds(graph, strategy, cluster, owner) for strategy in (replicated, sharded)]
    found = []
    for name in names:
        whole_bytes = shard_bytes(graph, replicated, name)
        found.append(
            (
                KnapsackOption(
                    resident_bytes=_resident_bytes(graph, replicated, name),
                    seconds=seconds[REPLICATED].get(name, 0.0),
                ),
                KnapsackOption(
                    resident_bytes=_resident_bytes(graph, sharded, name),
                    transient_bytes=2 * whole_bytes,
                    seconds=seconds[SHARDED].get(name, 0.0),
                ),
            )
        )
    return tuple(found)


def _resident_bytes(graph: LogicalGraph, strategy: Strategy, name: str) -> int:
    """Return a rank's bytes of a parameter, its states and, if it is trained, its gradient."""
    states = sum(
        shard_bytes(graph, strategy, entry.name)
        for entry in states_of(graph, name)
        if not strategy.storage[entry.name].offloaded
    )
    copies = 2 if name in graph.new_states else 1
    return copies * shard_bytes(graph, strategy, name) + states


def shard_bytes(graph: LogicalGraph, strategy: Strategy, name: str) -> int:
    """Return the bytes of a state on the first rank, whose shard is the largest."""
    tensor, storage = graph.tensor(name), strategy.storage[name]
    mesh_shape = strategy.stages[storage.stage].mesh_shape
    shape = local_shape(tensor.shape, storage.sbp, mesh_shape, (0,) * len(mesh_shape))
    return replace(tensor, shape=shape).size_bytes


def _seconds(
    graph: LogicalGraph, strategy: Strategy, cluster: Cluster, owner: Mapping[str, str]
) -> dict[str, float]:
    """Return for each parameter the time of its boxing and of its update in one step."""
    found: dict[str, float] = {}
    lowered = lower(graph, strategy)
    for item in lowered.items:
        value = lowered.held[item.outputs[0]].value if item.outputs[0] in lowered.held else ""
        name, node = owner.get(value), item.node
        if name is None:
            continue
        seconds = 0.0
        if item.step is not None:
            seconds = boxing_step_time_s(item.step, cluster)
        elif node is not None and node.phase is Phase.OPTIMIZER:
            assigned = strategy.nodes[node.name]
            mesh = strategy.stages[assigned.stage]
            seconds = op_time_s(OpCall.of(graph, node), assigned.signature, mesh, cluster)
        repeats = graph.repetitions[item.rate]
        found[name] = found.get(name, 0.0) + repeats * seconds
    for state, stored in strategy.storage.items():
        if stored.offloaded and state in owner:
            copy_s = host_copy_time_s(shard_bytes(graph, strategy, state), cluster.device)
            found[owner[state]] = found.get(owner[state], 0.0) + copy_s
    return found
