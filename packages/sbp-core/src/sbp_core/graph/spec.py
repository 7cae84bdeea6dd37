"""The specification of a valid `LogicalGraph`, and its verifier, which runs after every pass."""

from __future__ import annotations

from sbp_core.errors import GraphError
from sbp_core.graph.ir import (
    ITEMSIZE,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    ScalarType,
    TensorType,
)

#: Types of host scalars.
_SCALARS = ("float", "int", "bool")

_NAMESPACES = ("aten", "host", "sbp", "prims")

_OFTEN = {
    Rate.MICRO: "for each micro-batch",
    Rate.UPDATE: "for each update",
    Rate.STEP: "once a step",
}

#: The rates, from the most frequent on.
_RATES = tuple(Rate)


def verify_graph(graph: LogicalGraph) -> LogicalGraph:
    """Check a graph against the specification and return it.

    1. Names of nodes are unique; every value is made once, before its use, and has type and size.
    2. Ops name a namespace, an operator and (for ATen) an overload.
    3. `host.*` nodes make host scalars, from host scalars only (`host.item` reads a 0-d tensor);
       other nodes make tensors only.
    4. Every state output names a state input of the same type; there is at most one loss, 0-d.
    5. A node uses no value that is made more often than it runs, except through `sbp.accumulate`,
       and none that another node makes less often. With one micro-batch, rates bind the forward
       phase only, which begins before the optimizer.
    6. A state replaced by a value of micro-batch or update rate is carried: each micro-batch reads
       the value that the previous micro-batch or update has written, and nodes of step rate read
       the value from before the step. It is a tensor, or a step counter of the optimizer.
    7. Each update uses equally many micro-batches.

    Raises:
        GraphError: names the node and the rule that it breaks.
    """
    if graph.num_updates < 1 or graph.num_micro_batches % graph.num_updates:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_updates} updates of {graph.num_micro_batches} "
            "micro-batches",
            accepted="a divisor of the number of micro-batches",
        )
    for name, kind in graph.types.items():
        known = ITEMSIZE if isinstance(kind, TensorType) else _SCALARS
        if kind.dtype not in known:
            raise GraphError(f"{name!r} is {kind}", accepted=f"dtypes {', '.join(known)}")
        if isinstance(kind, TensorType) and any(extent < 0 for extent in kind.shape):
            raise GraphError(f"{name!r} is {kind}", accepted="extents >= 0")
    _check_values(graph)
    for node in graph.nodes:
        _check_node(graph, node)
    _check_outputs(graph)
    return graph


def _check_values(graph: LogicalGraph) -> None:
    known = {entry.name for entry in graph.inputs}
    if untyped := known - graph.types.keys():
        raise GraphError(f"the input {min(untyped)!r} has no type")
    if len(known) != len(graph.inputs):
        raise GraphError(f"graph {graph.name!r} has two inputs of one name")
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            raise GraphError(f"two nodes are called {node.name!r}", where=node.where())
        names.add(node.name)
        for value in node.inputs():
            if value not in known:
                raise GraphError(
                    f"{value!r} is used before it is made",
                    where=node.where(),
                    accepted="nodes in topological order",
                )
        for value in node.outputs:
            if value in known:
                raise GraphError(f"{value!r} is made twice", where=node.where())
            if value not in graph.types:
                raise GraphError(f"{value!r} has no type", where=node.where())
            known.add(value)
    for out in graph.outputs:
        if out.value not in known:
            raise GraphError(f"output {out.name!r} is {out.value!r}, which nothing makes")


def _check_node(graph: LogicalGraph, node: Node) -> None:
    parts = node.op.split(".")
    if len(parts) < 2 or not all(parts):
        raise GraphError(
            f"{node.op!r} is no operator name",
            where=node.where(),
            accepted=f"namespace.operator[.overload], such as {', '.join(_NAMESPACES)}",
        )
    made = {isinstance(graph.types[value], ScalarType) for value in node.outputs}
    if made != {node.is_host}:
        raise GraphError(
            "host ops make host scalars, other ops tensors",
            where=node.where(),
            accepted="host.* for arithmetic on host scalars",
        )
    reads = node.is_host and any(graph.is_tensor(value) for value in node.inputs())
    if reads and node.op != "host.item":
        raise GraphError("a host op uses a tensor", where=node.where())
    if node.phase is Phase.WEIGHT_GRADIENT:
        raise GraphError(
            f"{node.name!r} is of the phase {node.phase.value!r}, which only actors have",
            where=node.where(),
            accepted="forward, backward, optimizer",
        )
    _check_rates(graph, node)


def _check_rates(graph: LogicalGraph, node: Node) -> None:
    for value in node.inputs():
        rate = graph.rate_of(value)
        if graph.repetitions[node.rate] < graph.repetitions[rate]:
            raise GraphError(
                f"{value!r} is made {_OFTEN[rate]}, but used {_OFTEN[node.rate]}",
                where=node.where(),
                accepted="sbp.accumulate between the two (pass 'accumulate')",
            )
        binds = graph.num_micro_batches > 1 or node.phase is Phase.FORWARD
        if binds and _RATES.index(node.rate) < _RATES.index(rate) and value in graph.producers:
            raise GraphError(
                f"{value!r} is made {_OFTEN[rate]}, but used {_OFTEN[node.rate]}",
                where=node.where(),
                accepted="values of the same micro-batch, states, scalars",
            )


def _check_outputs(graph: LogicalGraph) -> None:
    losses = [out for out in graph.outputs if out.kind is OutputKind.LOSS]
    if len(losses) > 1:
        raise GraphError(f"graph {graph.name!r} has {len(losses)} losses", accepted="one")
    for out in losses:
        if not graph.is_tensor(out.value) or graph.tensor(out.value).shape:
            raise GraphError(f"the loss {out.value!r} is {graph.types[out.value]}", accepted="0-d")
    for out in graph.outputs:
        if out.kind is not OutputKind.STATE:
            continue
        entry = graph.input_kinds.get(out.name)
        if entry is None or not entry.kind.is_state:
            states = [e.name for e in graph.inputs if e.kind is InputKind.PARAMETER]
            raise GraphError(
                f"output {out.name!r} replaces no state", accepted=", ".join(states[:8])
            )
        if graph.types[out.value] != graph.types[out.name]:
            raise GraphError(
                f"the new value of {out.name!r} is {graph.types[out.value]}",
                accepted=str(graph.types[out.name]),
            )
        is_counter = graph.input_kinds[out.name].kind is InputKind.OPTIMIZER_STATE
        if out.name in graph.carried and not graph.is_tensor(out.name) and not is_counter:
            raise GraphError(
                f"host number {out.name!r} is replaced for each micro-batch",
                accepted="host numbers of the optimizer, or those that are replaced once a step",
            )
