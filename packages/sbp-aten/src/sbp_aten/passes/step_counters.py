"""Replace the step counters of the optimizer, one tensor a parameter, by one number on the host.

`torch.optim` keeps a 0-d `step` tensor for every parameter. Mostly they are equal, so one host
number suffices: `tie_step_counters` finds counters that only count and are only read on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from sbp_core.errors import GraphError
from sbp_core.graph import (
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    ScalarType,
    TensorType,
    rename_outputs,
    rename_uses,
)

STEP_COUNTER = "step_counter"


def tie_step_counters(graph: LogicalGraph, *, apart: bool = False) -> LogicalGraph:
    """Replace equal counting states by one host scalar `step_counter`.

    States of one key share a counter; states of further keys have separate counters, such as
    `step_counter.count`.

    Args:
        graph: A captured graph.
        apart: Whether each parameter has a separate host scalar, such as `step_counter.w1.step`,
            because they are not equal, for example after some parameters were frozen.

    before: s1 = add(w1.step, 1); n1 = host.item(s1); s2 = add(w2.step, 1); n2 = host.item(s2)
    after:  s1 = host.add(step_counter, 1)            n1, n2 are s1;  states w1.step, w2.step: s1

    Raises:
        GraphError: counters of one key advance by different amounts, so they are not equal.
    """
    found: dict[str, dict[str, Node]] = defaultdict(dict)
    for entry in graph.inputs:
        if node := _counter(graph, entry):
            key = entry.name if apart else entry.name.rpartition(".")[2]
            found[key][entry.name] = node
    for index, (key, counters) in enumerate(found.items()):
        graph = _tied(
            graph, STEP_COUNTER if index == 0 and not apart else f"{STEP_COUNTER}.{key}", counters
        )
    return graph


def _tied(graph: LogicalGraph, name: str, counters: Mapping[str, Node]) -> LogicalGraph:
    """Replace some counters, by state, by the host scalar `name`."""
    steps = {repr(node.args[1]) for node in counters.values()}
    if len(steps) != 1:
        raise GraphError(
            f"optimizer step counters advance by different amounts: {', '.join(sorted(steps))}",
            accepted="one amount for all parameters",
        )
    kept_node = next(iter(counters.values()))
    new_value = f"{name}.add"
    names = dict.fromkeys(counters, name)
    names |= {node.outputs[0]: new_value for node in counters.values()}
    items = defaultdict(list)
    for node in graph.nodes:
        if node.op == "host.item" and node.args[0].name in names:
            items[node.name] = list(node.outputs)
            names[node.outputs[0]] = new_value
    gone = {node.name for node in counters.values()} | set(items)
    step_counter = GraphInput(name=name, kind=InputKind.OPTIMIZER_STATE, stands_for=tuple(counters))
    add = replace(
        rename_uses(kept_node, names), name=new_value, op="host.add", outputs=(new_value,), tags=()
    )
    nodes = [add] + [rename_uses(node, names) for node in graph.nodes if node.name not in gone]
    outputs = [out for out in graph.outputs if out.name not in counters]
    return graph.with_nodes(
        tuple(nodes),
        inputs=(*(e for e in graph.inputs if e.name not in counters), step_counter),
        outputs=(
            *rename_outputs(outputs, names),
            GraphOutput(name=name, kind=OutputKind.STATE, value=new_value),
        ),
        types={**graph.types, name: ScalarType(), new_value: ScalarType()},
    )


def _counter(graph: LogicalGraph, entry: GraphInput) -> Node | None:
    """Return the node that advances a state, if the state is a counter read on the host only."""
    kind = graph.types[entry.name]
    if entry.kind is not InputKind.OPTIMIZER_STATE or not isinstance(kind, TensorType):
        return None
    users = graph.users[entry.name]
    if kind.shape or len(users) != 1:
        return None
    (node,) = users
    counts = node.op == "aten.add.Tensor" and len(node.args) == 2 and not node.kwargs
    if not counts or isinstance(node.args[1], tuple) or not isinstance(node.args[1], int | float):
        return None
    readers = graph.users[node.outputs[0]]
    replaces = graph.new_states.get(entry.name) == node.outputs[0]
    return node if replaces and all(reader.op == "host.item" for reader in readers) else None
