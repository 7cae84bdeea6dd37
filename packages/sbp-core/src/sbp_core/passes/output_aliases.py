"""Let what leaves the step lie in memory of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sbp_core.graph.ir import (
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
)
from sbp_core.signatures.views import seen_inputs

_FROM_CALLER = (InputKind.BATCH, InputKind.RNG)


def unalias_outputs(graph: LogicalGraph) -> LogicalGraph:
    """Copy what would leave as an input itself, or in the memory of the caller's batch.

    A caller may fill the batch anew for the next step, and a state that looks at it would change.
    A parameter that is reported is copied by what updates it, with the value from before.

    before: outputs last = view(%x), seen = %scale
    after:  a = clone(view(%x)); b = clone(%scale); outputs last = a, seen = b
    """
    known = {node.name for node in graph.nodes} | set(graph.types)
    types = dict(graph.types)
    made: dict[tuple[str, Rate, Phase], Node] = {}
    outputs: list[GraphOutput] = []
    for out in graph.outputs:
        if graph.is_tensor(out.value) and _needs_copy(graph, out):
            when = _when(graph, out)
            if (out.value, *when) not in made:
                name = f"{out.value}.own"
                while name in known:
                    name += "'"
                known.add(name)
                types[name] = graph.types[out.value]
                made[(out.value, *when)] = _copy(graph, out.value, name, *when)
            out = replace(out, value=made[(out.value, *when)].outputs[0])
        outputs.append(out)
    if not made:
        return graph
    behind: dict[str, list[Node]] = defaultdict(list)
    early: list[Node] = []
    late: list[Node] = []
    for (value, rate, _), node in made.items():
        producer = graph.producers.get(value)
        if producer is not None:
            behind[producer.name].append(node)
        else:
            (early if rate is Rate.MICRO else late).append(node)
    nodes = (part for node in graph.nodes for part in (node, *behind[node.name]))
    return graph.with_nodes((*early, *nodes, *late), outputs=tuple(outputs), types=types)


def _needs_copy(graph: LogicalGraph, out: GraphOutput) -> bool:
    if out.value not in graph.producers:
        return out.name != out.value or out.kind is not OutputKind.STATE
    return any(
        graph.input_kinds[name].kind in _FROM_CALLER for name in seen_inputs(graph, out.value)
    )


def _when(graph: LogicalGraph, out: GraphOutput) -> tuple[Rate, Phase]:
    """Return when a copy is made: with its source; of a state that the update moves, once."""
    producer = graph.producers.get(out.value)
    if producer is not None:
        return producer.rate, producer.phase
    kind = graph.input_kinds[out.value].kind
    target = graph.input_kinds.get(out.name)
    to_buffer = out.kind is OutputKind.STATE and target and target.kind is InputKind.BUFFER
    if kind in _FROM_CALLER or to_buffer:
        return Rate.MICRO, Phase.FORWARD
    return Rate.STEP, Phase.OPTIMIZER


def _copy(graph: LogicalGraph, value: str, name: str, rate: Rate, phase: Phase) -> Node:
    producer = graph.producers.get(value)
    blank = Node(
        name=name,
        op="aten.clone.default",
        args=(Ref(value),),
        outputs=(name,),
        phase=phase,
        rate=rate,
        tags=("pointwise",),
    )
    if producer is None:
        return blank
    return replace(blank, module=producer.module, source=producer.source, forward=producer.forward)
