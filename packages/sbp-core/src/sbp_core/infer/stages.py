"""Assign the nodes and inputs of a graph to pipeline stages, which run or store them.

A node that a pattern names goes to that stage. The other nodes follow: a forward node goes to the
latest stage of its arguments, or to its users if it reads graph inputs only (constants, views of
parameters or of the batch); a backward node goes to its forward node, an optimizer node to its
parameter. An input that several stages use, such as a tied weight, is stored on the first of them,
which sends it to the other stages. Without patterns the forward pass is cut between blocks, to
minimise the work of the largest stage. This module knows nothing of SBP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph.ir import InputKind, LogicalGraph, Node, Phase, block_of
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import work_flop

#: Module path patterns of each stage.
StagePatterns = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """The stage of every node that computes tensors, and of every tensor input."""

    nodes: Mapping[str, int]
    inputs: Mapping[str, int]


def assign_stages(graph: LogicalGraph, num_stages: int, patterns: StagePatterns = ()) -> StageMap:
    """Assign every node and every tensor input to a stage.

    Args:
        graph: The training step.
        num_stages: Stages, >= 1.
        patterns: For each stage, `fnmatch` patterns of module paths (modules inside a matching
            one belong to it); empty: split evenly.

    Raises:
        ConfigError: patterns do not fit the number of stages or match no module.
        PlanError: an edge leads to an earlier stage.
    """
    if num_stages == 1 and not patterns:
        return StageMap(
            nodes={node.name: 0 for node in graph.nodes if not node.is_host},
            inputs={entry.name: 0 for entry in graph.inputs if graph.is_tensor(entry.name)},
        )
    # In this order each stage follows from earlier ones: forward nodes, then backward nodes, then
    # inputs (from their users), then optimizer nodes (from the states that they update).
    chosen = _matched(graph, num_stages, patterns) if patterns else split_evenly(graph, num_stages)
    nodes = _forward_stages(graph, chosen)
    _check_forward(graph, nodes)
    return _completed(graph, nodes)


def placed_stages(graph: LogicalGraph, chosen: Mapping[str, int]) -> StageMap:
    """Return the stages of all nodes and inputs, from the stages of some forward nodes.

    Unlike in a pipeline, values may go back and forth between stages: branches of a model on
    separate ranks, whose results are combined on other ranks.

    Args:
        graph: The training step.
        chosen: Stages of forward nodes, by name.
    """
    return _completed(graph, _forward_stages(graph, chosen))


def _completed(graph: LogicalGraph, nodes: dict[str, int]) -> StageMap:
    """Return the stages of all nodes and inputs, which follow from the forward nodes."""
    _add_backward_stages(graph, nodes)
    inputs = _input_stages(graph, nodes)
    _add_optimizer_stages(graph, nodes, inputs)
    return StageMap(nodes=nodes, inputs=inputs)


def _tensor_nodes(graph: LogicalGraph, *phases: Phase) -> list[Node]:
    return [node for node in graph.nodes if not node.is_host and node.phase in phases]


def _matched(graph: LogicalGraph, num_stages: int, patterns: StagePatterns) -> dict[str, int]:
    """Return the stage of each forward node that a pattern names."""
    if len(patterns) != num_stages:
        raise ConfigError(
            f"stage_patterns has {len(patterns)} lists for {num_stages} stages",
            accepted=f"{num_stages} lists of module patterns, or none to split evenly",
        )
    modules = {node.module for node in _tensor_nodes(graph, Phase.FORWARD)}
    stage_of: dict[str, int] = {}
    for stage, group in enumerate(patterns):
        for pattern in group:
            found = [module for module in modules if _covers(pattern, module)]
            if not found:
                raise ConfigError(
                    f"the stage pattern {pattern!r} of stage {stage} matches no module",
                    accepted=", ".join(sorted(module for module in modules if module)),
                )
            for module in found:
                if stage_of.setdefault(module, stage) != stage:
                    raise ConfigError(
                        f"module {module!r} is on stage {stage_of[module]} and on stage {stage}",
                        where=f"stage pattern {pattern!r}",
                        todo="let the patterns of two stages match different modules",
                    )
    return {
        node.name: stage_of[node.module]
        for node in _tensor_nodes(graph, Phase.FORWARD)
        if node.module in stage_of
    }


def _covers(pattern: str, module: str) -> bool:
    """Return whether the pattern matches the module or an enclosing one."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def moving_nodes(graph: LogicalGraph) -> list[Node]:
    """Return the forward nodes that depend on a batch input, in graph order.

    Constants and views of parameters are not among them: they have no place of their own in the
    chain, and are ignored where it is cut.

    Args:
        graph: The training step.
    """
    values = {entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH}
    found = []
    for node in _tensor_nodes(graph, Phase.FORWARD):
        if values.intersection(node.inputs()):
            values.update(node.outputs)
            found.append(node)
    return found


def split_evenly(graph: LogicalGraph, num_stages: int) -> dict[str, int]:
    """Cut the forward pass between blocks so that the largest stage has the least flop.

    A block is a run of nodes, in graph order, whose module paths agree up to and including the
    first number (`blocks.3`), or else in their first part; it includes the calls that it makes
    meanwhile. Exact, by dynamic programming over the cuts, O(stages * blocks^2).

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    runs, whole = _runs(graph), forward_blocks(graph)
    if len(whole) >= num_stages:
        runs = whole
    if len(runs) < num_stages:
        raise PlanError(
            f"the forward pass has {len(runs)} blocks for {num_stages} stages",
            accepted="at least one block for each stage",
            todo="use fewer stages, such as fewer positions of the mesh axis 'pipe', or name the "
            "modules of each stage in planner.stage_patterns",
        )
    work = [sum(work_flop(OpCall.of(graph, node)) for node in run) for run in runs]
    cuts = balanced_cuts(work, num_stages)
    return {
        node.name: stage
        for stage, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(runs)], strict=True))
        for run in runs[first:last]
        for node in run
    }


def forward_blocks(graph: LogicalGraph) -> list[list[Node]]:
    """Return the forward nodes that depend on the batch, block by block, in graph order.

    Args:
        graph: The training step.
    """
    return _whole_blocks(_runs(graph))


def _runs(graph: LogicalGraph) -> list[list[Node]]:
    """Return the nodes that depend on the batch, in runs of one block each."""
    runs: list[list[Node]] = []
    for block, members in groupby(moving_nodes(graph), key=lambda node: block_of(node.module)):
        run = list(members)
        if block or not runs:
            runs.append(run)
        else:  # code of the root module between blocks belongs to the block after it
            runs[-1].extend(run)
    return runs


def _whole_blocks(runs: Sequence[list[Node]]) -> list[list[Node]]:
    """Merge the runs of each numbered block, as long as no other block is between them.

    A block may call a module that all blocks share:

        before    blocks.1 | rotary | blocks.1 | blocks.2 | rotary | blocks.2
        after     blocks.1 .................... | blocks.2 ...................
    """
    names = [block_of(run[0].module) for run in runs]
    merged: list[list[Node]] = []
    at = 0
    while at < len(runs):
        end = at + 1
        for later in range(at + 1, len(runs)):
            if names[later] == names[at]:
                end = later + 1
            elif _is_numbered(names[later]):
                break
        if not _is_numbered(names[at]):
            end = at + 1
        merged.append([node for run in runs[at:end] for node in run])
        at = end
    return merged


def _is_numbered(block: str) -> bool:
    return block.rpartition(".")[2].isdigit()


def balanced_cuts(work: Sequence[float], num_parts: int) -> list[int]:
    """Return where to cut a list into contiguous parts whose largest sum is least.

    Among equals the sum of squares decides, then the earliest cuts.

    Returns:
        `num_parts - 1` increasing indices; no part is empty.
    """
    sums = [0.0]
    for entry in work:
        sums.append(sums[-1] + entry)
    # best[part, stop] is about the first `stop` entries in `part` parts: (largest sum, sum of
    # squares, cuts). Tuples compare entry by entry, which is the order of preference. The last part
    # goes from `cut` to `stop`:
    #
    #     [ part - 1 parts ......... | last part ]
    #     0                         cut          stop
    best = {(1, stop): (sums[stop], sums[stop] ** 2, list[int]()) for stop in range(1, len(sums))}
    for part in range(2, num_parts + 1):
        for stop in range(part, len(sums)):
            best[part, stop] = min(
                (
                    max(best[part - 1, cut][0], sums[stop] - sums[cut]),
                    best[part - 1, cut][1] + (sums[stop] - sums[cut]) ** 2,
                    [*best[part - 1, cut][2], cut],
                )
                for cut in range(part - 1, stop)
            )
    return best[num_parts, len(work)][2]


def _forward_stages(graph: LogicalGraph, chosen: Mapping[str, int]) -> dict[str, int]:
    stages: dict[str, int] = {}
    forward = _tensor_nodes(graph, Phase.FORWARD)
    for node in forward:
        before = [
            stages[producer.name]
            for value in node.inputs()
            if (producer := graph.producers.get(value)) and producer.name in stages
        ]
        if node.name in chosen:
            stages[node.name] = chosen[node.name]
        elif before:
            stages[node.name] = max(before)
    homes: dict[str, int] = {}
    for node in forward:
        if node.name in stages:
            homes.setdefault(node.module, stages[node.name])
    # The remaining nodes read graph inputs only. From the back, so that chains of such nodes follow
    # their last user. The earliest of several users: values cannot go back to an earlier stage. A
    # node without users, such as a count of batches, is where the rest of its module is.
    for node in reversed(forward):
        if node.name not in stages:
            users = [user for value in node.outputs for user in graph.users[value]]
            after = [stages[user.name] for user in users if user.name in stages]
            stages[node.name] = min(after, default=homes.get(node.module, 0))
    return stages


def _check_forward(graph: LogicalGraph, stages: Mapping[str, int]) -> None:
    for node in _tensor_nodes(graph, Phase.FORWARD):
        for value in node.inputs():
            producer = graph.producers.get(value)
            if producer is None or producer.is_host:
                continue
            if stages[producer.name] > stages[node.name]:
                raise PlanError(
                    f"{value!r} is made on stage {stages[producer.name]} and used on the earlier "
                    f"stage {stages[node.name]} by {node.name!r}",
                    where=(*producer.where(), *node.where()),
                    accepted="stages that do not decrease along the forward pass",
                    todo="move one of the two modules to another stage (stage_patterns)",
                )


def _add_backward_stages(graph: LogicalGraph, stages: dict[str, int]) -> None:
    """Give each backward node the stage of its forward node, of its module, or of its input."""
    modules: dict[str, set[int]] = {}
    for node in _tensor_nodes(graph, Phase.FORWARD):
        modules.setdefault(node.module, set()).add(stages[node.name])
    for node in _tensor_nodes(graph, Phase.BACKWARD):
        of_module = modules.get(node.module, set())
        if node.op == ACCUMULATE:
            stages[node.name] = _largest_input(graph, node, stages)
        elif node.forward in stages:
            stages[node.name] = stages[node.forward]
        elif len(of_module) == 1:
            stages[node.name] = min(of_module)
        else:
            stages[node.name] = _largest_input(graph, node, stages)
    for node in _tensor_nodes(graph, Phase.BACKWARD):
        stages[node.name] = _sending_stage(graph, node, stages)


def _sending_stage(graph: LogicalGraph, node: Node, stages: Mapping[str, int]) -> int:
    """Return the stage of a backward node: its arguments' stage, if its result is smaller.

    Where a residual block begins, two gradients would cross from a stage to the stage before, which
    adds them. Their sum crosses instead:

        before    stage 1: a, b    both to stage 0    stage 0: a + b
        after     stage 1: a, b, a + b, to stage 0
    """
    here = stages[node.name]
    taken = dict.fromkeys(graph.tensor_inputs(node))
    makers = [graph.producers.get(value) for value in taken]
    homes = {stages.get(maker.name) if maker else None for maker in makers}
    there = homes.pop() if len(homes) == 1 else None
    if there is None or there == here or any(m and m.phase is not Phase.BACKWARD for m in makers):
        return here
    others = (user for value in taken for user in graph.users[value] if user is not node)
    # If another node on this stage takes one of them, it is sent anyway.
    if any(stages.get(user.name) == here for user in others):
        return here
    sizes = [sum(graph.tensor(v).size_bytes for v in vs) for vs in (taken, node.outputs)]
    return there if sizes[1] < sizes[0] else here


def _largest_input(graph: LogicalGraph, node: Node, stages: Mapping[str, int]) -> int:
    """Return the stage of the producer of a node's largest tensor argument (0 if none)."""
    made = [
        (graph.tensor(value).size_bytes, stages[graph.producers[value].name])
        for value in graph.tensor_inputs(node)
        if value in graph.producers and graph.producers[value].name in stages
    ]
    return max(made, default=(0, 0))[1]


def _input_stages(graph: LogicalGraph, stages: Mapping[str, int]) -> dict[str, int]:
    inputs: dict[str, int] = {}
    for entry in graph.inputs:
        if not graph.is_tensor(entry.name) or entry.kind is InputKind.OPTIMIZER_STATE:
            continue
        found = [stages[user.name] for user in graph.users[entry.name] if user.name in stages]
        inputs[entry.name] = min(found, default=0)
    # Optimizer states second: they follow their parameter, whose stage must be known.
    for entry in graph.inputs:
        if entry.kind is InputKind.OPTIMIZER_STATE and graph.is_tensor(entry.name):
            inputs[entry.name] = inputs.get(entry.of, 0)
    return inputs


def _add_optimizer_stages(
    graph: LogicalGraph, stages: dict[str, int], inputs: Mapping[str, int]
) -> None:
    """Give each optimizer node the stage of the state it reads, else of its largest argument."""
    of_module = {
        name.rpartition(".")[0]: stage
        for name, stage in inputs.items()
        if graph.input_kinds[name].kind is InputKind.PARAMETER
    }
    for node in _tensor_nodes(graph, Phase.OPTIMIZER):
        states = [inputs[value] for value in graph.tensor_inputs(node) if value in inputs]
        if states:
            # It reads the state that it updates; gradients are boxed to the state's stage.
            stages[node.name] = states[0]
        elif node.module in of_module:
            stages[node.name] = of_module[node.module]
        else:
            stages[node.name] = _largest_input(graph, node, stages)
