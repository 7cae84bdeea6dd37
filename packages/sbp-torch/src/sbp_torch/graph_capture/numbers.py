"""Numbers of Python that forward and loss read, as scalar inputs of a step.

    before: loss = kl * beta               beta is 0.1 in a variable, an attribute or an entry
    after:  loss = mul(kl, %number.beta)   and a step is told what is there now

While the forward is traced, a symbolic number of PyTorch takes its place; arithmetic on it
becomes `host.*` nodes. A program that looks at its value cannot be traced so. One that does
something else for a symbolic number than for a float is found by `check_numbers`, which puts values
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

#: What host operators raise of numbers that they do not take.
_FAILURES = (ArithmeticError, ValueError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberPlace:
    """A place where a program keeps a number: a variable, an attribute, an entry.

    Args:
        label: As messages call it: `beta`, `model.temperature`, `config['beta']`.
        at: What tells it from other places: the id of what holds it, which `read` keeps alive, and
            the key there.
        read: Returns what is there.
        write: Puts something else there.
    """

    label: str
    at: tuple[int, Hashable]
    read: Callable[[], Any]
    write: Callable[[Any], None]


#: That no number is an input.
NO_NUMBERS: Mapping[str, NumberPlace] = MappingProxyType({})


@contextmanager
def placed(places: Mapping[str, NumberPlace], values: Mapping[str, Any]) -> Iterator[None]:
    """Put values into places inside the `with` block; what was there is there again afterwards.

    Args:
        places: By the names of inputs.
        values: By the same names: floats, or symbolic numbers.

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
    """Return nodes with the arithmetic on host numbers in the phase in which it is used.

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
    """Return numbers, and those that follow from them alone, by name.

    Args:
        nodes: In their order; those that also need something else are left out.
        values: By the names of inputs.

    Raises:
        CaptureError: a host operator does not take them.
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
    """See that a step with numbers as inputs is, with their values, one that has them in it.

    before: n = host.mul(2.0, number.beta); y = mul(x, n)
    after:  y = mul(x, 0.2)                                    this is compared

    Args:
        graph: Has an input for each number.
        values: By the names of the inputs.
        captured: Was captured with these values.

    Raises:
        CaptureError: they differ; names the first node that does. Or a host operator does not take
            the values.
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
    """Return where two graphs differ first, but for the names of their values; None if nowhere.

    Arguments are compared by their text: nan is nan, 0.0 is not -0.0, and 1 is not 1.0.
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
    """Return what a node is, but for its name and the names of what it makes."""
    kwargs = {key: map_refs(value, change) for key, value in sorted(node.kwargs.items())}
    return (
        node.op,
        repr(map_refs(node.args, change)),
        repr(kwargs),
        [graph.types[value] for value in node.outputs],
        (node.phase, node.rate, node.module, node.tags),
    )
