"""Turn Python numbers that the user's forward and loss read into inputs of the captured step.

    before: loss = kl * beta               beta is 0.1 in a variable, an attribute or an entry
    after:  loss = mul(kl, %number.beta)   and each step gets the present value of beta

While the forward is traced, a symbolic number of PyTorch takes its place; arithmetic on it becomes
`host.*` nodes. A program that branches on its value cannot be traced this way. A program that
treats a symbolic number differently from a float is found by `check_numbers`, which puts values
into the graph and compares it with graphs that were captured with these values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sbp_core.errors import CaptureError
from sbp_core.graph import (
    Argument,
    LogicalGraph,
    Node,
    Phase,
    Rate,
    Ref,
    map_refs,
)
from sbp_torch.ops.operators import operator_of

#: The errors of host operators for numbers that they do not accept.
_FAILURES = (ArithmeticError, ValueError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberPlace:
    """A place where a program keeps a number: a variable, an attribute, an entry.

    Args:
        label: Its name in messages: `beta`, `model.temperature`, `config['beta']`.
        at: Its identity: the id of the object that contains it, which `read` keeps alive, and the
            key in that object.
        read: Returns the present value.
        write: Replaces the value.
    """

    label: str
    at: tuple[int, Hashable]
    read: Callable[[], Any]
    write: Callable[[Any], None]


#: No number is an input.
NO_NUMBERS: Mapping[str, NumberPlace] = MappingProxyType({})


@contextmanager
def placed(places: Mapping[str, NumberPlace], values: Mapping[str, Any]) -> Iterator[None]:
    """Put values into places inside the `with` block, and restore the old values at its end.

    Args:
        places: Places by the names of inputs.
        values: Values by the same names: floats, or symbolic numbers.

    Raises:
        CaptureError: a place cannot be written, or the block has written to it.
    """
    with ExitStack() as back:
        for name, place in places.items():
            before = place.read()
            try:
                place.write(values[name])
            except (AttributeError, TypeError) as error:
                raise CaptureError(
                    f"{place.label} cannot be written: {error}", accepted="places that can"
                ) from error
            back.callback(place.write, before)
        yield
        for name, place in places.items():
            if place.read() is not values[name]:
                raise CaptureError(
                    f"forward or loss writes {place.label}", accepted="numbers that they only read"
                )


def at_forward(nodes: list[Node]) -> list[Node]:
    """Return nodes with host arithmetic moved to the phase that uses it.

    before: n = host.mul(2.0, number.beta) [step]; y = mul(x, n) [micro]
    after:  n = host.mul(2.0, number.beta) [micro]; y = mul(x, n) [micro]
    """
    found, used = list[Node](), set[str]()
    for node in reversed(nodes):
        early = any(value in used for value in node.outputs)
        if node.is_host and early:
            node = replace(node, phase=Phase.FORWARD, rate=Rate.MICRO, module="", source="")
        if early or (not node.is_host and node.phase is not Phase.OPTIMIZER):
            used.update(node.inputs())
        found.append(node)
    return found[::-1]


def host_numbers(nodes: Iterable[Node], values: Mapping[str, float]) -> dict[str, Argument]:
    """Return numbers, and all numbers that are computed from them alone, by name.

    Args:
        nodes: Nodes in their order; nodes with other arguments are skipped.
        values: The numbers, by the names of inputs.

    Raises:
        CaptureError: a host operator does not accept the numbers.
    """
    known: dict[str, Argument] = dict(values)
    for node in nodes:
        inputs = node.inputs()
        if not (node.is_host and inputs and all(value in known for value in inputs)):
            continue
        args = map_refs(node.args, lambda ref: known[ref.name])
        try:
            known[node.outputs[0]] = operator_of(node.op)(*args)
        except _FAILURES as error:
            told = ", ".join(map(str, args))
            raise CaptureError(
                f"{node.op.removeprefix('host.')} of {told}: {error}",
                where=node.where(),
                accepted="numbers with which forward and loss can be computed",
            ) from error
    return known


def without_unused(graph: LogicalGraph, names: Collection[str]) -> LogicalGraph:
    """Return a graph without the named inputs that nothing uses or replaces."""
    inside = graph.input_kinds.keys() & set(names)
    unused = {name for name in inside if not graph.users[name] and name not in graph.new_states}
    inputs = tuple(entry for entry in graph.inputs if entry.name not in unused)
    types = {name: kind for name, kind in graph.types.items() if name not in unused}
    return graph.with_nodes(graph.nodes, inputs=inputs, types=types) if unused else graph


def check_numbers(graph: LogicalGraph, values: Mapping[str, float], captured: LogicalGraph) -> None:
    """Check that a graph with numbers as inputs equals, for given values, a graph of these values.

    before: n = host.mul(2.0, number.beta); y = mul(x, n)
    after:  y = mul(x, 0.2)                                    this is compared

    Args:
        graph: A graph with an input for each number.
        values: The values, by the names of the inputs.
        captured: A graph that was captured with these values.

    Raises:
        CaptureError: the graphs differ, and the error names the first different node; or a host
            operator does not accept the values.
    """
    known = host_numbers(graph.nodes, values)

    def put(ref: Ref) -> Argument:
        return known.get(ref.name, ref)

    nodes: list[Node] = []
    for node in graph.nodes:
        if not any(value in known for value in node.outputs):
            args = map_refs(node.args, put)
            kwargs = {key: map_refs(value, put) for key, value in node.kwargs.items()}
            nodes.append(replace(node, args=args, kwargs=kwargs))
    inputs = tuple(entry for entry in graph.inputs if entry.name not in values)
    types = {name: kind for name, kind in graph.types.items() if name not in known}
    with_numbers = graph.with_nodes(tuple(nodes), inputs=inputs, types=types)
    found = difference(with_numbers, captured)
    if found is not None:
        raise CaptureError(
            f"a symbolic number makes another step than a float does: {found}",
            accepted="numbers that are only calculated with",
        )


def difference(one: LogicalGraph, other: LogicalGraph) -> str | None:
    """Return the first difference of two graphs, ignoring names of values; None if they are equal.

    Arguments are compared by their text: nan equals nan, 0.0 differs from -0.0, and 1 from 1.0.
    """
    types = [[graph.types[entry.name] for entry in graph.inputs] for graph in (one, other)]
    if one.inputs != other.inputs or types[0] != types[1]:
        return "the inputs are others"
    values = {entry.name: entry.name for entry in one.inputs}
    nodes = {"": ""}
    for node, twin in zip(one.nodes, other.nodes, strict=False):
        found = _node_key(one, node, lambda ref: Ref(values[ref.name]))
        if (*found, nodes.get(node.forward)) != (*_node_key(other, twin), twin.forward):
            return f"{twin.op}, {', '.join(node.where())}"
        values.update(zip(node.outputs, twin.outputs, strict=True))
        nodes[node.name] = twin.name
    if len(one.nodes) != len(other.nodes):
        return f"{len(one.nodes)} operators, not {len(other.nodes)}"
    outputs = [(out.name, out.kind, values[out.value]) for out in one.outputs]
    if outputs != [(out.name, out.kind, out.value) for out in other.outputs]:
        return "the outputs are others"
    return None


def _node_key(
    graph: LogicalGraph, node: Node, change: Callable[[Ref], Argument] = lambda ref: ref
) -> tuple[object, ...]:
    """Return a node in comparable form, without its name and the names of its results."""
    kwargs = {key: map_refs(value, change) for key, value in sorted(node.kwargs.items())}
    return (
        node.op,
        repr(map_refs(node.args, change)),
        repr(kwargs),
        [graph.types[value] for value in node.outputs],
        (node.phase, node.rate, node.module, node.tags),
    )
