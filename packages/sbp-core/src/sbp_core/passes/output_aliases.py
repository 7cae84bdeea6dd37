"""Copy outputs of a captured graph that are an input, or that alias the caller's batch."""

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
from sbp_core.graph.primitives import CLONE
from sbp_core.signatures.views import aliased_inputs

_FROM_CALLER = (InputKind.BATCH, InputKind.RNG)


def unalias_outputs(graph: LogicalGraph) -> LogicalGraph:
    """Copy outputs that are an input themselves, or that alias the caller's batch.

    A caller may overwrite the batch for the next step, which would change a state that views it.
    A parameter that is reported is copied once a step, with its value from before the update.

    before: outputs last = view(%x), seen = %scale
    after:  a = clone(view(%x)); b = clone(%scale); outputs last = a, seen = b
    """
    known = {node.name for node in graph.nodes} | set(graph.types)
    types = dict(graph.types)
    made: dict[tuple[str, Rate, Phase], Node] = {}
    outputs: list[GraphOutput] = []
    for out in graph.outputs:
        if graph.is_tensor(out.value) and _needs_copy(graph, out):
            what = (out.value, *_rate_and_phase(graph, out))
            if what not in made:
                name = f"{out.value}.own"
                while name in known:
                    name += "'"
                known.add(name)
                types[name] = graph.types[out.value]
                _, rate, phase = what
                like = graph.producers.get(
                    out.value, Node(name=name, op=CLONE, args=(), outputs=())
                )
                made[what] = Node(
                    name=name,
                    op=CLONE,
                    args=(Ref(out.value),),
                    outputs=(name,),
                    phase=phase,
                    rate=rate,
                    module=like.module,
                    source=like.source,
                    forward=like.forward,
                    tags=("pointwise",),
                )
            out = replace(out, value=made[what].outputs[0])
        outputs.append(out)
    if not made:
        return graph
    after: dict[str, list[Node]] = defaultdict(list)
    first: list[Node] = []
    last: list[Node] = []
    for (value, rate, _), node in made.items():
        producer = graph.producers.get(value)
        if producer is not None:
            after[producer.name].append(node)
        else:
            (first if rate is Rate.MICRO else last).append(node)
    nodes = (part for node in graph.nodes for part in (node, *after[node.name]))
    return graph.with_nodes((*first, *nodes, *last), outputs=tuple(outputs), types=types)


def _needs_copy(graph: LogicalGraph, out: GraphOutput) -> bool:
    if out.value not in graph.producers:
        return out.name != out.value or out.kind is not OutputKind.STATE
    return any(
        graph.input_kinds[name].kind in _FROM_CALLER for name in aliased_inputs(graph, out.value)
    )


def _rate_and_phase(graph: LogicalGraph, out: GraphOutput) -> tuple[Rate, Phase]:
    """Return rate and phase of a copy: its source's; once a step for an updated state."""
    producer = graph.producers.get(out.value)
    if producer is not None:
        return producer.rate, producer.phase
    kind = graph.input_kinds[out.value].kind
    target = graph.input_kinds.get(out.name)
    to_buffer = out.kind is OutputKind.STATE and target and target.kind is InputKind.BUFFER
    if kind in _FROM_CALLER or to_buffer:
        return Rate.MICRO, Phase.FORWARD
    return Rate.STEP, Phase.OPTIMIZER
