"""Find equal layers of a model, so that the search for shardings decides and prices them once.

    blocks.0.mlp.up   blocks.1.mlp.up   blocks.2.mlp.up        one variable, that of `blocks.0`

Nodes inside numbered blocks are alike if their names differ in the number of the block alone, and
their calls, meshes and pins are the same. Any other nodes, such as the calls of a module that all
blocks share, are alike if they make the same call, take values that are alike, and are used by
nodes that are alike: the colour of a node is refined by the colours of its neighbours until no new
colour appears. The names of blocks do not matter, so this works for any model with numbered layers.

    blocks.0 -> blocks.1    blocks.1 -> blocks.2    blocks.2 -> norm

Values that cross layers are alike if their producers are alike, and all their users: here the first
two, which cost twice as much as one; the third is different.

Source: Weisfeiler and Leman, "The reduction of a graph to canonical form", 1968 (refinement).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.graph.ir import GraphInput, LogicalGraph
from sbp_core.infer.pins import Pins
from sbp_core.infer.work import StepWork

#: The number of a block in a name: the first one after a dot.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualLayers:
    """The equal parts of a step; each node and input is represented by the first one like it.

    Args:
        nodes: For each node that computes tensors, the name of the first node like it.
        inputs: For each tensor input, the name of the first input like it.
        values: For each class of tensors that are made and used alike, the first one and their
            number.
    """

    nodes: Mapping[str, str]
    inputs: Mapping[str, str]
    values: tuple[tuple[str, int], ...]


def find_equal_layers(work: StepWork, pins: Pins) -> EqualLayers:
    """Return the parts of a step that are equal whenever their decisions are equal.

    Args:
        work: The step.
        pins: The pins; nodes and inputs with different pins are not alike.
    """
    inputs = _firsts(_input_colours(work, pins))
    nodes = _firsts(node_colours(work, _options(work, pins)))
    values: dict[Hashable, list[str]] = {}
    for value, key in _value_keys(work, nodes, inputs).items():
        values.setdefault(key, []).append(value)
    return EqualLayers(
        nodes=nodes,
        inputs=inputs,
        values=tuple((alike[0], len(alike)) for alike in values.values()),
    )


def generic_name(name: str) -> str:
    """Return a name without the number of its block."""
    return _NUMBER.sub("*", name, count=1)


def node_colours(work: StepWork, options: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Return a colour for each node that computes tensors, equal for nodes that are alike.

    Args:
        work: The step.
        options: For each node, what has to be equal in nodes that are alike.
    """
    graph = work.graph
    colours: dict[str, Hashable] = {}
    others = []
    for node in work.nodes:
        is_numbered = _NUMBER.search(node.name) is not None
        name = generic_name(node.name) if is_numbered else ""
        colours[node.name] = (name, node.op, node.phase, options[node.name])
        if not is_numbered:
            others.append(node)
    number = 0
    while len(set(colours.values())) > number:
        number = len(set(colours.values()))
        refined: dict[str, Hashable] = {}
        for node in others:
            taken = tuple(
                generic_name(value) if (made := graph.producers.get(value)) is None
                else colours.get(made.name, made.op)
                for value in graph.tensor_inputs(node)
            )  # fmt: skip
            users = [
                colours.get(user.name, user.op)
                for value in node.outputs
                for user in graph.users[value]
            ]
            refined[node.name] = (colours[node.name], taken, frozenset(users))
        # Numbers replace the tuples, which would grow with every round.
        numbers: dict[Hashable, int] = {}
        for name, colour in refined.items():
            colours[name] = numbers.setdefault(colour, len(numbers))
    return colours


def _firsts(colours: Mapping[str, Hashable]) -> dict[str, str]:
    """Return for each name the first name of its colour."""
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(colour, name) for name, colour in colours.items()}


def _options(work: StepWork, pins: Pins) -> dict[str, Hashable]:
    """Return for each node what its options depend on: call, mesh, rate, and pins."""
    pinned: dict[str, Hashable] = {}
    for (value, axis), pin in sorted(pins.use.items(), key=lambda item: item[0]):
        pinned[value] = (*_tuple(pinned.get(value)), (axis, pin.entry, pin.firm))
    numbers: dict[Hashable, int] = {}
    found: dict[str, Hashable] = {}
    for node in work.nodes:
        taken = tuple(pinned.get(value) for value in work.graph.tensor_inputs(node))
        key = (*(work.kinds[node.name], work.mesh_shape_of(node), node.rate), taken)
        number = found[node.name] = numbers.setdefault(key, len(numbers))
        if any(pin is not None for pin in taken) and work.is_free(node):
            # The results of a view of a pinned value may be pinned as a consequence.
            for at, value in enumerate(node.outputs):
                pinned[value] = (*_tuple(pinned.get(value)), ("view", number, at))
    return found


def _tuple(found: Hashable) -> tuple[Hashable, ...]:
    return found if isinstance(found, tuple) else ()


def _input_colours(work: StepWork, pins: Pins) -> dict[str, Hashable]:
    pinned: dict[str, list[Hashable]] = defaultdict(list)
    for (name, axis), pin in sorted(pins.storage.items(), key=lambda item: item[0]):
        pinned[name].append((axis, pin.entry, pin.firm))

    def colour(entry: GraphInput) -> Hashable:
        name = entry.name
        stage = work.stages.inputs[name]
        return (
            *(generic_name(name), entry.kind, work.graph.tensor(name)),
            *(work.mesh_shape(stage), tuple(pinned.get(name, ()))),
        )

    own = {entry.name: colour(entry) for entry in work.inputs}
    # A state may share the variable of its parameter.
    return {
        name: (found, own.get(work.parameter_of_state.get(name, ""))) for name, found in own.items()
    }


def _value_keys(
    work: StepWork, nodes: Mapping[str, str], inputs: Mapping[str, str]
) -> dict[str, Hashable]:
    """Return for each tensor what its conversions depend on, if alike parts are decided alike."""
    graph: LogicalGraph = work.graph
    makers: dict[str, Hashable] = {
        entry.name: (inputs[entry.name], work.stages.inputs[entry.name]) for entry in work.inputs
    }
    asked: dict[str, list[Hashable]] = defaultdict(list)
    phases: dict[str, dict[str, None]] = defaultdict(dict)
    for node in work.nodes:
        name, stage = nodes[node.name], work.stages.nodes[node.name]
        for at, value in enumerate(node.outputs):
            makers[value] = (name, at, stage)
        for at, value in enumerate(graph.tensor_inputs(node)):
            asked[value].append((name, at, stage))
            phases[value][node.phase.value] = None
    for value, states in work.states_by_value.items():
        asked[value] += [(inputs[state], work.stages.inputs[state]) for state in states]
    keys: dict[str, Hashable] = {}
    for value in graph.types:
        if graph.is_tensor(value):
            again = is_gathered_on_use(graph, value)
            when = phases[value] if again else ("",)
            # Equal companions are one object, which lives as long as the work.
            beside = tuple(id(work.companions.of(value, phase)) for phase in when)
            keys[value] = (
                *(makers[value], *work.unsliced(value), graph.rate_of(value), again, beside),
                *(value in work.reported_values, *asked[value]),
            )
    return keys
