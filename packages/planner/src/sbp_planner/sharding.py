"""Make the strategies that the planner `osdp` compares: shard no parameters, all, or some of them.

    axis        the mesh axis over which samples are split, N ranks; inference and the user's pins
                have decided the other axes, and the stages of a pipeline
    replicated  batch and activations S(0) on the axis; parameters, states, gradients, updates B
    sharded     the same, with parameters, states, gradients and updates S(d) on the axis
    mixed       the decisions on each parameter from one of these two

The dim d is 0, or the first that no later axis splits. Otherwise gathering a dim that an inner axis
splits, too, would move pieces between the groups of that axis.

    weight (8, 4) on data 2 x tensor 2, stored (B, S(0))
        (S(0), S(0))   rank 0, 0 has rows 0-1 of 8, and is to have rows 0-3    from other groups
        (S(1), S(0))   rank 0, 0 has columns 0-1 of rows 0-3, and lacks 2-3    of its group
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, Pipelined, StagePatterns, infer_axis, infer_strategy
from sbp_core.planning import PlanRequest
from sbp_core.sbp import Split
from sbp_core.strategy import Strategy
from sbp_planner.guide import owners, shardable, states_of, update_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingExtremes:
    """The two extreme strategies between which storages are chosen.

    Args:
        replicated: The strategy that shards no parameter on the axis.
        sharded: The strategy that shards all of them.
        names: The parameters that are stored differently in the two.
    """

    replicated: Strategy
    sharded: Strategy
    names: tuple[str, ...]


def ends_of(
    request: PlanRequest,
    axis: str,
    *,
    stages: Pipelined,
    stage_patterns: StagePatterns = (),
    pins: Mapping[str, PinValue] | None = None,
) -> ShardingExtremes:
    """Return the two extreme strategies of a step.

    Args:
        request: The request to plan.
        axis: Mesh axis over which data are split.
        stages: The placements of the stages, and the order of their work.
        stage_patterns: Patterns of the modules of each stage; empty splits evenly.
        pins: Pins of the planner.

    Raises:
        ConfigError: a pin is invalid.
        PlanError: the pins or the stages cannot be satisfied.
    """
    asked = replace(request, progress=None, pins={**(pins or {}), **request.pins})
    replicated = infer_strategy(
        asked,
        planner="osdp",
        pins=_pins(axis),
        stages=stages.stages,
        stage_patterns=stage_patterns,
        in_flight=stages.in_flight,
        orders=stages.orders,
        staleness=stages.staleness,
    )
    sharded = infer_axis(
        asked, replicated, axis=axis, pins=_pins(axis) | _sharded(request.graph, replicated, axis)
    )
    names = tuple(
        name
        for name in shardable(request.graph)
        if replicated.storage[name] != sharded.storage[name]
    )
    return ShardingExtremes(replicated=replicated, sharded=sharded, names=names)


def _pins(axis: str) -> dict[str, PinValue]:
    words = ("parameters", "optimizer_states", "gradients", "updates")
    split = {word: {axis: "S(0)"} for word in ("batch", "use:batch", "activations")}
    return {**split, **{word: {axis: "B"} for word in words}}


def _sharded(graph: LogicalGraph, replicated: Strategy, axis: str) -> dict[str, PinValue]:
    """Return the pins that shard every parameter, with its states, gradient and update."""
    owned = update_values(graph)
    pins: dict[str, PinValue] = {}
    for name in shardable(graph):
        entry = f"S({shard_dim(graph, replicated, name, axis)})"
        states = [state.name for state in states_of(graph, name)]
        pins |= {tensor: {axis: entry} for tensor in (name, *states, *owned.get(name, ()))}
    return pins


def shard_dim(graph: LogicalGraph, replicated: Strategy, name: str, axis: str) -> int:
    """Return the dim of a parameter that is split on the axis if it is sharded."""
    storage = replicated.storage[name]
    mesh = replicated.stages[storage.stage]
    at = mesh.axes.index(axis)
    later = zip(storage.sbp[at + 1 :], mesh.mesh_shape[at + 1 :], strict=True)
    taken = {sbp.dim for sbp, size in later if isinstance(sbp, Split) and size > 1}
    shape = graph.tensor(name).shape
    free = (dim for dim in range(len(shape)) if dim not in taken)
    # With fewer elements than ranks in the dim, some ranks would have none.
    wide = (dim for dim in free if dim == 0 or shape[dim] >= mesh.mesh_shape[at])
    return next(wide, 0)


def mixed(graph: LogicalGraph, ends: ShardingExtremes, chosen: Set[str]) -> Strategy:
    """Return the strategy that shards some parameters; boxing joins the different decisions.

    Args:
        graph: The step.
        ends: The strategies that shard none, and all.
        chosen: The parameters to shard.
    """
    replicated, sharded = ends.replicated, ends.sharded
    owner = owners(graph, ends.names)
    nodes = dict(replicated.nodes)
    # For each node, the parameters that it serves: it makes their gradients or updates, directly or
    # through other nodes on which the two strategies differ.
    decided_for: dict[str, set[str]] = {}
    # The loop goes backwards, because a node serves what its users serve. A node is taken from the
    # sharded strategy only if it serves sharded parameters alone. A node that serves both kinds,
    # such as the norm of all gradients, stays as in the replicated strategy.
    for node in reversed(graph.nodes):
        if node.name not in nodes or nodes[node.name] == sharded.nodes[node.name]:
            continue
        found: set[str] = set()
        for value in node.outputs:
            found |= {owner[value]} if value in owner else set()
            for user in graph.users[value]:
                found |= decided_for.get(user.name, set())
        decided_for[node.name] = found
        if found and found <= chosen:
            nodes[node.name] = sharded.nodes[node.name]
    storage = {
        name: (sharded if owner.get(name) in chosen else replicated).storage[name]
        for name in replicated.storage
    }
    return replace(replicated, nodes=nodes, storage=storage, report={})
