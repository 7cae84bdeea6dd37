"""Make the accumulation over micro-batches explicit."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.errors import GraphError
from sbp_core.graph.ir import LogicalGraph, Node, OutputKind, Phase, Rate, Ref, TensorType
from sbp_core.graph.rewrite import rename_outputs, rename_uses

#: How the names of dtypes begin that hold means of their values.
_AVERAGED = ("float", "bfloat", "complex")


def accumulate(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Sum every value that crosses from micro-batch rate to step rate, scaled to the mean.

    before: g = mm(dy, x) [micro]; w1 = sub(w, g) [step]
    after:  g = mm(dy, x) [micro]; G = sbp.accumulate(g, 1/M); w1 = sub(w, G) [step]

    Raises:
        GraphError: M < 1; a state is replaced at micro-batch rate; or what crosses has no mean,
            such as a count of integers.
    """
    if num_micro_batches < 1:
        raise GraphError(f"num_micro_batches={num_micro_batches}", accepted="an integer >= 1")
    if num_micro_batches == 1:
        return graph
    micro = {v for node in graph.nodes if node.rate is Rate.MICRO for v in node.outputs}
    crossing = {
        value: None
        for node in graph.nodes
        if node.rate is Rate.STEP
        for value in node.inputs()
        if value in micro
    }
    for out in graph.outputs:
        if out.value in micro and out.kind is OutputKind.STATE:
            raise GraphError(
                f"state {out.name!r} is replaced at micro-batch rate",
                accepted="states that the optimizer replaces once a step",
                todo="train this model with one micro-batch",
            )
        if out.value in micro:
            crossing[out.value] = None
    for value in crossing:
        kind = graph.types[value]
        if not isinstance(kind, TensorType) or not kind.dtype.startswith(_AVERAGED):
            raise GraphError(
                f"{value!r} is {kind}: the mean of {num_micro_batches} micro-batches is none",
                where=graph.producers[value].where(),
                accepted="floating tensors",
                todo="convert it in the model, or train with one micro-batch",
            )
    names = {value: f"{value}.mean" for value in crossing}
    sums = [
        _sum_node(graph.producers[value], value, name, 1.0 / num_micro_batches)
        for value, name in names.items()
    ]
    first = [node for node in graph.nodes if node.rate is Rate.MICRO]
    last = [rename_uses(node, names) for node in graph.nodes if node.rate is Rate.STEP]
    types = {**graph.types, **{name: graph.types[value] for value, name in names.items()}}
    return graph.with_nodes(
        (*first, *sums, *last),
        outputs=rename_outputs(graph.outputs, names),
        types=types,
        num_micro_batches=num_micro_batches,
    )


def _sum_node(producer: Node, value: str, name: str, scale: float) -> Node:
    return replace(
        producer,
        name=name,
        op="sbp.accumulate",
        args=(Ref(value), scale),
        kwargs={},
        outputs=(name,),
        phase=producer.phase if producer.phase is Phase.FORWARD else Phase.BACKWARD,
        rate=Rate.MICRO,
        tags=("pointwise",),
    )
