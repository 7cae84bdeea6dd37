"""Insert nodes into a captured graph that sum gradients and metrics over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from sbp_core.errors import GraphError
from sbp_core.graph.ir import (
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    TensorType,
)
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.graph.rewrite import rename_outputs, rename_uses
from sbp_core.signatures.views import is_view, traits_of

#: Prefixes of the names of dtypes whose values have means.
_AVERAGED = ("float", "bfloat", "complex")

#: The suffix of the names of host numbers that are computed again, once a step.
_AGAIN = ".again"

#: Dtypes of counts: the count of a step is the sum over its micro-batches.
_COUNTED = ("int", "uint", "bool")


def accumulate(
    graph: LogicalGraph, num_micro_batches: int, *, num_updates: int = 1
) -> LogicalGraph:
    """Sum every value that crosses from micro-batch rate to step rate.

    Floating values are scaled to the mean. Metrics that count (integers, booleans) are summed as
    they are, booleans as `int64`. Metrics that are the `max`, `min`, `any` or `all` of all elements
    are combined to the largest or smallest. A parameter or buffer that is replaced at micro-batch
    rate, such as a batch-norm statistic, is not summed: each micro-batch reads the value of the one
    before, and work once a step reads the value of the last one. An optimizer state is written once
    a step: the part of it that depends on the gradient uses the mean.

    before: g = mm(dy, x) [micro]; w1 = sub(w, g) [step]
    after:  g = mm(dy, x) [micro]; G = sbp.accumulate(g, 1/M); w1 = sub(w, G) [step]

    Values that another pass has accumulated do not change: they are made once a step.

    With U updates a step the optimizer runs U times, each time with the mean over the M / U
    micro-batches since the update before, and later work reads what that update has written:

    after:  g = mm(dy, x) [micro]; G = sbp.accumulate(g, U/M, update); w1 = sub(w, G) [update]

    If there are as many updates as micro-batches, there is nothing to sum, and everything except
    the reported results has micro-batch rate.

    Raises:
        GraphError: M < 1, or U does not divide it; a host number is replaced at micro-batch rate;
            the optimizer uses a value without a mean, such as a count of integers, or draws random
            numbers; or forward and optimizer change the same parameter.
    """
    if num_micro_batches < 1:
        raise GraphError(f"num_micro_batches={num_micro_batches}", accepted="an integer >= 1")
    if num_updates < 1 or num_micro_batches % num_updates:
        raise GraphError(
            f"num_updates={num_updates} of {num_micro_batches} micro-batches",
            accepted="a divisor of the number of micro-batches",
        )
    if num_micro_batches == 1:
        return graph
    _check_draws(graph, num_micro_batches)
    _check_written_once(graph, _micro_values(graph), num_micro_batches)
    if num_updates > 1:
        late = Rate.UPDATE if num_updates < num_micro_batches else Rate.MICRO
        nodes = (replace(n, rate=late) if n.rate is Rate.STEP else n for n in graph.nodes)
        graph = graph.with_nodes(tuple(nodes))
    graph = replace(graph, num_micro_batches=num_micro_batches, num_updates=num_updates)
    if num_updates < num_micro_batches:
        graph = _with_sums(graph)
    return _with_results(graph)


def _with_sums(graph: LogicalGraph) -> LogicalGraph:
    """Return a graph in which the optimizer uses sums of values of micro-batches.

    a value that the optimizer uses         its mean over micro-batches                g -> g.mean
    a carried state that it uses            the value of the last micro-batch          m -> m.last
    a new value of an optimizer state       the mean, because it is written less often
    """
    micro = _micro_values(graph)
    carried = _carried(graph, micro)
    late = Rate.UPDATE if graph.num_updates > 1 else Rate.STEP
    count = graph.num_micro_batches // graph.num_updates
    used = [v for node in graph.nodes if node.rate is late for v in node.inputs()]
    means = [out.value for out in graph.outputs if _is_optimizer_state(graph, out)]
    numbers = _numbers_again(graph, used, late)
    again = {node.outputs[0].removesuffix(_AGAIN): node.outputs[0] for node in numbers}
    crossing = dict.fromkeys(v for v in (*used, *means) if v in micro and v not in again)
    names = {v: f"{v}.last" if v in carried else f"{v}.mean" for v in crossing}
    scales = {v: None if v in carried else _mean(graph, v, count) for v in crossing}
    sums = [_sum_node(graph, value, names[value], scales[value], late) for value in crossing]
    # In topological order: no node of rate micro reads a sum, or a result of the optimizer.
    micro_nodes = [node for node in graph.nodes if node.rate is Rate.MICRO]
    late_nodes = [rename_uses(node, names | again) for node in graph.nodes if node.rate is late]
    return graph.with_nodes(
        (*micro_nodes, *sums, *numbers, *late_nodes),
        outputs=tuple(
            rename_outputs([out], names)[0] if _is_optimizer_state(graph, out) else out
            for out in graph.outputs
        ),
        types={
            **graph.types,
            **_types(graph, names),
            **{name: graph.types[value] for value, name in again.items()},
        },
    )


def _numbers_again(graph: LogicalGraph, used: Iterable[str], late: Rate) -> list[Node]:
    """Return nodes that compute host numbers again that micro-batches and the optimizer both use.

    Numbers that depend on scalar inputs alone are the same in all micro-batches, so they have no
    mean.

    before: n = host.sub(1, w) [micro];  y = mul(x, n) [micro];  z = mul(s, n) [step]
    after:  n = host.sub(1, w) [micro];  y = mul(x, n) [micro];  n.again = host.sub(1, w) [step];
            z = mul(s, n.again) [step]
    """
    scalars = {entry.name for entry in graph.inputs if entry.kind is InputKind.SCALAR}
    known: dict[str, Node] = {}
    for node in graph.nodes:
        if node.is_host and node.rate is Rate.MICRO and {*node.inputs()} <= scalars | known.keys():
            known[node.outputs[0]] = node
    needed, left = set[str](), [value for value in used if value in known]
    while left:
        value = left.pop()
        if value not in needed:
            needed.add(value)
            left += [one for one in known[value].inputs() if one in known]
    names = {value: f"{value}{_AGAIN}" for value in needed}
    return [
        replace(rename_uses(node, names), name=names[value], outputs=(names[value],), rate=late)
        for value, node in known.items()
        if value in needed
    ]


def _with_results(graph: LogicalGraph) -> LogicalGraph:
    """Return a graph whose loss and metrics are results of the step: mean, sum, or extreme."""
    reported = [out.value for out in graph.outputs if out.kind is not OutputKind.STATE]
    # Inputs that differ between micro-batches: batch tensors and carried states.
    batch = {entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH}
    varying = batch | graph.carried.keys()
    made = {value for node in graph.nodes for value in node.outputs}
    values = dict.fromkeys(
        value
        for value in reported
        if value in varying or (value in made and graph.rate_of(value) is not Rate.STEP)
    )
    names: dict[str, str] = {}
    sums: list[Node] = []
    for value in values:
        combination = _combination(graph, value)
        names[value] = f"{value}.{combination}"
        is_there = names[value] in graph.types
        if is_there and graph.num_updates == 1:
            continue  # the optimizer uses the same mean that is reported
        _check_samples(graph, value)
        if is_there:
            names[value] += "_of_step"
        how: float | str = 1 if combination == "sum" else combination
        if combination == "mean":
            rate = graph.rate_of(value) if value in graph.producers else Rate.MICRO
            how = _mean(graph, value, graph.repetitions[rate])
        sums.append(_sum_node(graph, value, names[value], how, Rate.STEP))
    last = [node for node in graph.nodes if node.rate is Rate.STEP]
    return graph.with_nodes(
        (*(node for node in graph.nodes if node.rate is not Rate.STEP), *sums, *last),
        outputs=tuple(
            out if out.kind is OutputKind.STATE else rename_outputs([out], names)[0]
            for out in graph.outputs
        ),
        types={**graph.types, **_types(graph, names)},
    )


def _check_samples(graph: LogicalGraph, value: str) -> None:
    """Refuse results with a number for each sample: their places differ between micro-batches.

    Raises:
        GraphError: a result has as many rows as a micro-batch has samples.
    """
    batch = (e.name for e in graph.inputs if e.kind is InputKind.BATCH and graph.is_tensor(e.name))
    samples = {graph.tensor(name).shape[0] for name in batch if graph.tensor(name).shape}
    shape = graph.tensor(value).shape if graph.is_tensor(value) else ()
    is_state = any(out.value == value and out.kind is OutputKind.STATE for out in graph.outputs)
    if shape and shape[0] in samples and not is_state:
        name = next(out.name for out in graph.outputs if out.value == value)
        producer = graph.producers.get(value)
        raise GraphError(
            f"{name!r} has {shape[0]} rows, as many as a micro-batch has samples: a step reports "
            "one result of all micro-batches, which would mix samples",
            where=producer.where() if producer is not None else (),
            accepted="metrics without a row for each sample",
            todo="report a mean or a sum over samples, or take one micro-batch",
        )


def _micro_values(graph: LogicalGraph) -> set[str]:
    made = {value for node in graph.nodes for value in node.outputs}
    return {value for value in made if graph.rate_of(value) is Rate.MICRO}


def _is_optimizer_state(graph: LogicalGraph, out: GraphOutput) -> bool:
    """Whether an output is the new value of an optimizer state that is a tensor."""
    if out.kind is not OutputKind.STATE or not graph.is_tensor(out.value):
        return False
    return graph.input_kinds[out.name].kind is InputKind.OPTIMIZER_STATE


def _carried(graph: LogicalGraph, micro: Iterable[str]) -> set[str]:
    """Return the new values of parameters and buffers that are replaced at micro-batch rate."""
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
    return {out.value for out in found if not _is_optimizer_state(graph, out)}


def _check_draws(graph: LogicalGraph, num_micro_batches: int) -> None:
    """Refuse random numbers of the optimizer: their counter advances once a micro-batch."""
    for node in graph.nodes:
        if node.rate is not Rate.STEP:
            continue
        entries = (graph.input_kinds.get(value) for value in node.inputs())
        if any(entry is not None and entry.kind is InputKind.RNG for entry in entries):
            raise GraphError(
                f"the optimizer draws random numbers, and there are {num_micro_batches} "
                "micro-batches to count them by",
                where=node.where(),
                accepted="random numbers of the forward phase",
                todo="train with one micro-batch, or with an optimizer that draws none",
            )


def _check_written_once(graph: LogicalGraph, micro: Iterable[str], num_micro_batches: int) -> None:
    """Refuse a parameter that forward changes, for each micro-batch, before the optimizer does.

    The optimizer would then start from the result of forward, not from the parameter.
    """
    made = set(micro)
    for out in graph.outputs:
        entry = graph.input_kinds.get(out.name) if out.kind is OutputKind.STATE else None
        if entry is None or entry.kind is not InputKind.PARAMETER or out.value in made:
            continue
        # The optimizer reads the parameter itself, so forward's result of it is no start value.
        if any(user.rate is Rate.STEP for user in graph.users[out.name]):
            continue
        sources = _boundary_inputs(graph, out.value, lambda node: node.rate is Rate.STEP)
        for value in sorted(sources & made):
            node = graph.producers[value]
            same = graph.types[value] == graph.types[out.name]
            if node.phase is not Phase.FORWARD or not same:
                continue
            if out.name in _boundary_inputs(graph, value, lambda node: node.rate is Rate.MICRO):
                raise GraphError(
                    f"{out.name!r} is changed in forward, once for each of {num_micro_batches} "
                    "micro-batches, and by the optimizer",
                    where=node.where(),
                    accepted="parameters that either forward or the optimizer changes",
                    todo="change it in the optimizer, or train with one micro-batch",
                )


def _boundary_inputs(graph: LogicalGraph, value: str, within: Callable[[Node], bool]) -> set[str]:
    """Return the values from outside of a part of the graph that a value depends on."""
    found: set[str] = set()
    seen, left = {value}, [value]
    while left:
        name = left.pop()
        node = graph.producers.get(name)
        if node is None or not within(node):
            found.add(name)
            continue
        for part in node.inputs():
            if part not in seen:
                seen.add(part)
                left.append(part)
    return found


def _combination(graph: LogicalGraph, value: str) -> str:
    """Return how the results of micro-batches are combined to the result of the step.

    `mean`, `sum`, `maximum` or `minimum`.
    """
    extreme = _extreme(graph, value)
    if extreme and all(o.kind is OutputKind.METRIC for o in graph.outputs if o.value == value):
        return extreme
    kind = graph.types[value]
    counts = isinstance(kind, TensorType) and kind.dtype.startswith(_COUNTED)
    return "sum" if counts else "mean"


def _extreme(graph: LogicalGraph, value: str) -> str:
    """Return whether a value is the largest or smallest of all elements of something, or neither.

    The order of numbers survives conversions, except to booleans.
    """
    node = graph.producers.get(value)
    # Back through views and copies to the reduction.
    while node is not None and (is_view(node.op) or node.kind in traits_of(node.op).copies):
        before, after = graph.tensor_inputs(node)[0], graph.tensor(value)
        if after.dtype == "bool" and graph.tensor(before).dtype != "bool":
            return ""
        value = before
        node = graph.producers.get(value)
    one = node is not None and graph.is_tensor(value) and not graph.tensor(value).shape
    if node is None or not one or len(graph.tensor_inputs(node)) != 1 or value != node.outputs[0]:
        return ""
    return traits_of(node.op).extremes.get(node.kind, "")


def _mean(graph: LogicalGraph, value: str, num_micro_batches: int) -> float:
    """Return the factor of each micro-batch's part of a mean.

    Raises:
        GraphError: the value is not a floating tensor.
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


def _sum_node(
    graph: LogicalGraph, value: str, name: str, how: float | str | None, until: Rate
) -> Node:
    # A batch tensor that is reported has no producer.
    source = Node(name=name, op=ACCUMULATE, args=(), outputs=(name,))
    producer = graph.producers.get(value, source)
    return replace(
        producer,
        name=name,
        op=ACCUMULATE,
        args=(Ref(value), how),
        kwargs={} if until is Rate.STEP else {"rate": until.value},
        outputs=(name,),
        phase=producer.phase if producer.phase is Phase.FORWARD else Phase.BACKWARD,
        tags=("pointwise",),
    )


def _types(graph: LogicalGraph, names: Mapping[str, str]) -> dict[str, TensorType]:
    """Return the types of sums by their names; a count of booleans is an `int64`."""
    found = {name: graph.tensor(value) for value, name in names.items()}
    return {
        name: replace(kind, dtype="int64")
        if kind.dtype == "bool" and name.endswith(".sum")
        else kind
        for name, kind in found.items()
    }
