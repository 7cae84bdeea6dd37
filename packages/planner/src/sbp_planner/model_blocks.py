"""Group a captured step into blocks with times, from which planners cut pipeline stages.

    block         forward nodes of one numbered module, or of one child of the model
    seconds       its forward nodes, and the backward nodes that belong to them, on one device
    parameters    the parameters of its modules
    flow          a forward value that a later block uses

Times come from the cost model (`sbp_core.cost`): measured, or by the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.cluster import Cluster
from sbp_core.cost import op_time_s
from sbp_core.errors import PlanError
from sbp_core.graph import InputKind, LogicalGraph, Node, Phase, block_of
from sbp_core.infer import forward_blocks
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures import OpCall
from sbp_core.strategy import Signature
from sbp_planner.stages import AtomicBlock, BlockGraph, Flow, MachineLevel

_ONE = Placement((0,), ("rank",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBlocks:
    """The blocks of a step.

    Args:
        graph: The graph of blocks to cut; blocks have the names of `modules`.
        modules: Path of the module of each block, in the order of the forward pass.
    """

    graph: BlockGraph
    modules: tuple[str, ...]


def model_blocks(graph: LogicalGraph, cluster: Cluster) -> ModelBlocks:
    """Return the blocks of a step.

    Args:
        graph: The training step.
        cluster: The machine that runs it.

    Raises:
        PlanError: the model has no separate blocks.
    """
    runs = forward_blocks(graph)
    modules = tuple(block_of(run[0].module) for run in runs)
    if not all(modules) or len(set(modules)) < len(modules):
        raise PlanError(
            f"the modules of the forward pass tell no blocks apart: {', '.join(modules)}",
            todo="give the parts of the model modules of their own, or choose planner=propagate",
        )
    at = {node.name: module for module, run in zip(modules, runs, strict=True) for node in run}
    block_at = dict(at)
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD and node.forward in at:
            block_at[node.name] = at[node.forward]
    blocks = [_block(graph, cluster, module, block_at) for module in modules]
    return ModelBlocks(
        graph=BlockGraph(blocks=tuple(blocks), flows=tuple(_flows(graph, at))), modules=modules
    )


def _block(graph: LogicalGraph, cluster: Cluster, module: str, at: dict[str, str]) -> AtomicBlock:
    seconds = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    kept: dict[str, int] = {}
    for node in graph.nodes:
        if at.get(node.name) != module or node.is_host:
            continue
        seconds[node.phase] += _seconds(graph, node, cluster)
        for value in graph.tensor_inputs(node):
            maker = graph.producers.get(value)
            is_forward = maker is not None and maker.phase is Phase.FORWARD
            if node.phase is Phase.BACKWARD and is_forward:
                kept[value] = graph.tensor(value).size_bytes
    return AtomicBlock(
        name=module,
        forward_s=seconds[Phase.FORWARD],
        backward_s=seconds[Phase.BACKWARD],
        activation_bytes=sum(kept.values()),
        parameter_bytes=sum(
            graph.tensor(entry.name).size_bytes
            for entry in graph.inputs
            if entry.kind is InputKind.PARAMETER and block_of(entry.name) == module
        ),
    )


def _seconds(graph: LogicalGraph, node: Node, cluster: Cluster) -> float:
    call = OpCall.of(graph, node)
    whole = Signature((NdSbp(B),) * len(call.inputs), (NdSbp(B),) * len(call.outputs))
    return op_time_s(call, whole, _ONE, cluster)


def _flows(graph: LogicalGraph, at: dict[str, str]) -> list[Flow]:
    """Return the forward values that leave their block."""
    found = []
    for node in graph.nodes:
        for value in node.outputs if node.name in at else ():
            users = dict.fromkeys(at[u.name] for u in graph.users[value] if u.name in at)
            others = tuple(user for user in users if user != at[node.name])
            if others and graph.is_tensor(value):
                size = graph.tensor(value).size_bytes
                found.append(Flow(producer=at[node.name], consumers=others, num_bytes=size))
    return found


def machine_levels(cluster: Cluster, num_devices: int) -> tuple[MachineLevel, ...]:
    """Return the links of a machine as levels, the innermost first.

    Args:
        cluster: The machine.
        num_devices: Devices that are used, from rank 0 on. If they do not fill the groups of the
            machine, they are one level with its slowest link.
    """
    levels, size = [], 1
    for level in cluster.levels:
        if size == num_devices:
            break
        ranks = min(level.num_ranks, num_devices)
        if ranks % size or ranks == size:
            break
        levels.append(MachineLevel(components=ranks // size, bytes_per_s=level.link.bytes_per_s))
        size = ranks
    if size == num_devices and levels:
        return tuple(levels)
    slowest = min(level.link.bytes_per_s for level in cluster.levels)
    return (MachineLevel(components=num_devices, bytes_per_s=slowest),)
