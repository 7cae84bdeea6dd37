"""Make the accumulation over micro-batches explicit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sbp_core.errors import GraphError
from sbp_core.graph.ir import LogicalGraph, Node, OutputKind, Phase, Rate, Ref, TensorType
from sbp_core.graph.rewrite import rename_outputs, rename_uses

#: How the names of dtypes begin that hold means of their values.
_AVERAGED = ("float", "bfloat", "complex")

#: Dtypes of counts: the count of a step is the sum over its micro-batches.
_COUNTED = ("int", "uint", "bool")


def accumulate(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Sum every value that crosses from micro-batch rate to step rate.

    Floating values are scaled to the mean. Metrics that count (integers, booleans) are summed as
    they are, booleans as `int64`. A state that is replaced at micro-batch rate, such as a
    batch-norm statistic, stays so: each micro-batch reads what the one before has written. Whoever
    uses its new value once a step takes that of the last micro-batch.

    before: g = mm(dy, x) [micro]; w1 = sub(w, g) [step]
    after:  g = mm(dy, x) [micro]; G = sbp.accumulate(g, 1/M); w1 = sub(w, G) [step]

    Raises:
        GraphError: M < 1; a host number is replaced at micro-batch rate; or the optimizer uses what
            has no mean, such as a count of integers.
    """
    if num_micro_batches < 1:
        raise GraphError(f"num_micro_batches={num_micro_batches}", accepted="an integer >= 1")
    if num_micro_batches == 1:
        return graph
    micro = {v for node in graph.nodes if node.rate is Rate.MICRO for v in node.outputs}
    carried = _carried(graph, micro)
    used = [v for node in graph.nodes if node.rate is Rate.STEP for v in node.inputs()]
    crossing = dict.fromkeys(value for value in used if value in micro)
    reported = [out.value for out in graph.outputs if out.kind is not OutputKind.STATE]
    leaving = dict.fromkeys(value for value in reported if value in micro)
    names = {v: f"{v}.last" if v in carried else f"{v}.mean" for v in crossing}
    scales = {v: None if v in carried else _mean(graph, v, num_micro_batches) for v in crossing}
    sums = [_sum_node(graph, value, names[value], scales[value]) for value in crossing]
    results = {v: f"{v}.{_verb(graph, v)}" for v in leaving}
    for value in leaving:
        if names.get(value) != results[value]:
            scale = 1 if _verb(graph, value) == "sum" else _mean(graph, value, num_micro_batches)
            sums.append(_sum_node(graph, value, results[value], scale))
    first = [node for node in graph.nodes if node.rate is Rate.MICRO]
    last = [rename_uses(node, names) for node in graph.nodes if node.rate is Rate.STEP]
    return graph.with_nodes(
        (*first, *sums, *last),
        outputs=tuple(
            out if out.kind is OutputKind.STATE else rename_outputs([out], results)[0]
            for out in graph.outputs
        ),
        types={**graph.types, **_types(graph, names), **_types(graph, results)},
        num_micro_batches=num_micro_batches,
    )


def _carried(graph: LogicalGraph, micro: Iterable[str]) -> set[str]:
    """Return the new values of states that are replaced at micro-batch rate."""
    made = set(micro)
    found = [out for out in graph.outputs if out.value in made and out.kind is OutputKind.STATE]
    for out in found:
        if not graph.is_tensor(out.value):
            raise GraphError(
                f"host number {out.name!r} is replaced at micro-batch rate",
                where=graph.producers[out.value].where(),
                accepted="host numbers that the optimizer replaces once a step",
                todo="keep it as a tensor, or train with one micro-batch",
            )
    return {out.value for out in found}


def _verb(graph: LogicalGraph, value: str) -> str:
    """Return how a result of the micro-batches becomes that of the step: `mean` or `sum`."""
    kind = graph.types[value]
    counts = isinstance(kind, TensorType) and kind.dtype.startswith(_COUNTED)
    return "sum" if counts else "mean"


def _mean(graph: LogicalGraph, value: str, num_micro_batches: int) -> float:
    """Return the factor of each micro-batch's part of a mean.

    Raises:
        GraphError: the value is no floating tensor.
    """
    kind = graph.types[value]
    if not isinstance(kind, TensorType) or not kind.dtype.startswith(_AVERAGED):
        raise GraphError(
            f"{value!r} is {kind}: the mean of {num_micro_batches} micro-batches is none",
            where=graph.producers[value].where(),
            accepted="floating tensors",
            todo="convert it in the model, or train with one micro-batch",
        )
    return 1.0 / num_micro_batches


def _sum_node(graph: LogicalGraph, value: str, name: str, scale: float | None) -> Node:
    producer = graph.producers[value]
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


def _types(graph: LogicalGraph, names: Mapping[str, str]) -> dict[str, TensorType]:
    """Return the types of sums by their names; what is counted of booleans is an `int64`."""
    found = {name: graph.tensor(value) for value, name in names.items()}
    return {
        name: replace(kind, dtype="int64")
        if kind.dtype == "bool" and name.endswith(".sum")
        else kind
        for name, kind in found.items()
    }
