"""Group the operators of a step into tasks with times and bytes, which `placers` puts on ranks.

    group       forward nodes of one numbered module, or of one child of the model; a node of the
                root by itself, such as one that joins branches
    seconds     forward nodes; the backward nodes that belong to them; the update, once a step
    flow        a forward value that another group uses, and its gradient the other way

Groups that depend on each other, such as those of a module that is called twice, are merged. So are
groups that take no time and follow a single other group, and neighbours in a chain while there are
too many groups.

    stem --+--> left ---+--> mul --> head     the groups of two branches; backward, all arrows
           +--> right --+                     are turned
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from sbp_core.cluster import Cluster
from sbp_core.cost import op_time_s
from sbp_core.graph import InputKind, LogicalGraph, Node, Phase, TensorType, block_of
from sbp_core.infer import moving_nodes
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures import OpCall
from sbp_core.strategy import Signature

_ONE = Placement((0,), ("rank",))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Forward operators that are placed as one, and what belongs to them.

    Args:
        name: Name of their module, or of the first of several.
        nodes: Names of the forward nodes.
        forward_s: Seconds of the forward phase for one micro-batch, on one device.
        backward_s: Seconds of the backward phase for one micro-batch, on one device.
        update_s: Seconds of the optimizer, once a step.
        parameter_bytes: Bytes of its parameters.
        activation_bytes: Bytes of the saved activations of one micro-batch.
    """

    name: str
    nodes: tuple[str, ...]
    forward_s: float
    backward_s: float
    update_s: float
    parameter_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFlow:
    """The values that one group makes and another uses.

    Args:
        producer, consumer: Indices of groups.
        tensors: The values.
    """

    producer: int
    consumer: int
    tensors: tuple[TensorType, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all values, for one micro-batch."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroups:
    """The groups of a step, in topological order."""

    groups: tuple[OpGroup, ...]
    flows: tuple[GroupFlow, ...]


def op_groups(graph: LogicalGraph, cluster: Cluster, max_groups: int = 32) -> OpGroups:
    """Return the groups of a step.

    Args:
        graph: The training step.
        cluster: The machine that runs it.
        max_groups: Neighbours in chains are merged while there are more groups.
    """
    # Nodes that depend on a batch input; other nodes go to the groups that use them.
    of = {node.name: block_of(node.module) or node.name for node in moving_nodes(graph)}
    times = _times(graph, cluster, of)
    while True:
        # One merge at a time, because each changes the edges for the next.
        edges = _edges(graph, of)
        joined = _cycle(edges) or _follower(edges, of)
        if joined is None and len(set(of.values())) > max_groups:
            joined = _shortest_link(edges, times)
        if joined is None:
            break
        kept, gone = joined
        of = {node: kept if group == gone else group for node, group in of.items()}
        times[kept] = tuple(a + b for a, b in zip(times[kept], times.pop(gone), strict=True))
    return _made(graph, of, times)


def _times(
    graph: LogicalGraph, cluster: Cluster, of: Mapping[str, str]
) -> dict[str, tuple[float, ...]]:
    """Return seconds of forward, backward and update of each group, on one device."""
    found = {group: [0.0, 0.0, 0.0] for group in of.values()}
    owners = _owners(graph, of)
    for node in graph.nodes:
        if node.is_host:
            continue
        if node.name in of:
            found[of[node.name]][0] += _seconds(graph, node, cluster)
        elif node.phase is Phase.BACKWARD and node.forward in of:
            found[of[node.forward]][1] += _seconds(graph, node, cluster)
        elif node.phase is Phase.OPTIMIZER:
            read = (graph.input_kinds.get(value) for value in graph.tensor_inputs(node))
            own = {owners.get(e.of or e.name) for e in read if e is not None} - {None}
            if len(own) == 1:
                group = own.pop()
                assert group is not None, "it was left out"
                found[group][2] += _seconds(graph, node, cluster)
    return {group: tuple(seconds) for group, seconds in found.items()}


def _owners(graph: LogicalGraph, of: Mapping[str, str]) -> dict[str, str]:
    """Return the group that uses each parameter first, also through views and casts."""
    found: dict[str, str] = {}
    for entry in (entry for entry in graph.inputs if entry.kind is InputKind.PARAMETER):
        todo, seen = [entry.name], set[str]()
        while todo and entry.name not in found:
            value = todo.pop(0)
            for user in graph.users[value]:
                if user.name in of:
                    found.setdefault(entry.name, of[user.name])
                elif user.phase is Phase.FORWARD and user.name not in seen:
                    seen.add(user.name)
                    todo += user.outputs
    return found


def _seconds(graph: LogicalGraph, node: Node, cluster: Cluster) -> float:
    call = OpCall.of(graph, node)
    whole = Signature((NdSbp(B),) * len(call.inputs), (NdSbp(B),) * len(call.outputs))
    return op_time_s(call, whole, _ONE, cluster)


def _edges(graph: LogicalGraph, of: Mapping[str, str]) -> dict[str, dict[str, None]]:
    """Return the groups that use the values of each group, in the order of their first nodes."""
    edges: dict[str, dict[str, None]] = {group: {} for group in of.values()}
    for node in (node for node in graph.nodes if node.name in of):
        users = (of.get(user.name) for value in node.outputs for user in graph.users[value])
        edges[of[node.name]] |= {user: None for user in users if user not in (None, of[node.name])}
    return edges


def _cycle(edges: Mapping[str, Iterable[str]]) -> tuple[str, str] | None:
    """Return two groups that depend on each other, if there are any."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        kept, gone = sorted(error.args[1][:2], key=list(edges).index)
        return kept, gone
    return None


def _before(edges: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {group: [] for group in edges}
    for group, users in edges.items():
        for user in users:
            found[user].append(group)
    return found


def _follower(edges: Mapping[str, Iterable[str]], of: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a group and a single node of the root that follows only this group, if any."""
    before = _before(edges)
    for group in edges:
        if group in of and of[group] == group and len(before[group]) == 1:
            return before[group][0], group
    return None


def _shortest_link(
    edges: Mapping[str, Iterable[str]], times: Mapping[str, Sequence[float]]
) -> tuple[str, str] | None:
    """Return the two neighbours in a chain that take the least time together."""
    before = _before(edges)
    links = [
        (sum(times[group]) + sum(times[user]), group, user)
        for group, users in edges.items()
        for user in users
        if len(list(users)) == 1 and len(before[user]) == 1
    ]
    return min(links)[1:] if links else None


def _made(
    graph: LogicalGraph, of: Mapping[str, str], times: Mapping[str, tuple[float, ...]]
) -> OpGroups:
    # Topological order; of several groups that could be next, the first.
    edges, order = _edges(graph, of), list[str]()
    makers = _before(edges)
    while len(order) < len(edges):
        order.append(next(g for g in edges if g not in order and set(makers[g]) <= set(order)))
    at = {group: index for index, group in enumerate(order)}
    owners = _owners(graph, of)
    nodes: dict[str, list[str]] = {group: [] for group in order}
    kept: dict[str, dict[str, int]] = {group: {} for group in order}
    flows: dict[tuple[int, int], dict[str, TensorType]] = {}
    for node in graph.nodes:
        if node.name not in of:
            continue
        group = of[node.name]
        nodes[group].append(node.name)
        for value in node.outputs:
            if not graph.is_tensor(value):
                continue
            tensor = graph.tensor(value)
            for user in graph.users[value]:
                if user.phase is Phase.BACKWARD:
                    kept[of.get(user.forward or "", group)][value] = tensor.size_bytes
                elif user.name in of and of[user.name] != group:
                    flows.setdefault((at[group], at[of[user.name]]), {})[value] = tensor
    sizes = dict.fromkeys(order, 0)
    for name, group in owners.items():
        sizes[group] += graph.tensor(name).size_bytes
    return OpGroups(
        groups=tuple(
            OpGroup(
                name=group,
                nodes=tuple(nodes[group]),
                forward_s=times[group][0],
                backward_s=times[group][1],
                update_s=times[group][2],
                parameter_bytes=sizes[group],
                activation_bytes=sum(kept[group].values()),
            )
            for group in order
        ),
        flows=tuple(
            GroupFlow(producer=a, consumer=b, tensors=tuple(values.values()))
            for (a, b), values in sorted(flows.items())
        ),
    )


def stages_on(groups: OpGroups, chosen: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the stages as (place, groups): groups on the same ranks are merged if no rank waits.

    A stage sends its results after all its work, and begins when all its arguments have arrived. So
    a group joins the stage of its arguments if all of them are on the same ranks, and the stage
    sends nothing to other ranks; or if the group is the only user of the stage.
    """
    if len(set(chosen)) == 1:
        return [(chosen[0], list(range(len(chosen))))]
    makers: list[set[int]] = [set() for _ in chosen]
    users: list[set[int]] = [set() for _ in chosen]
    for flow in groups.flows:
        makers[flow.consumer].add(flow.producer)
        users[flow.producer].add(flow.consumer)
    stages: list[tuple[int, list[int]]] = []
    stage_of: dict[int, int] = {}

    def joins(stage: int, group: int) -> bool:
        place, members = stages[stage]
        if {place, *(chosen[maker] for maker in makers[group])} != {chosen[group]}:
            return False
        if len(makers[group]) == 1 and users[next(iter(makers[group]))] == {group}:
            return True
        # It sends nothing elsewhere: otherwise a stage that it waits for might wait for it.
        used_by = {user for member in members for user in users[member]}
        return all(chosen[user] == place and stage_of.get(user, stage) == stage for user in used_by)

    for group, place in enumerate(chosen):
        last = max((stage_of[maker] for maker in makers[group]), default=len(stages) - 1)
        if last >= 0 and joins(last, group):
            stage_of[group] = last
            stages[last][1].append(group)
        else:
            stage_of[group] = len(stages)
            stages.append((place, [group]))
    return stages
