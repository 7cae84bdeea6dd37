"""Change a strategy as little as a pin (a fixed sharding) asks for, to see what the pin costs.

    before   up: (S(0)) (B) -> (S(0))     relu, down, ... as they are
    pin      up: S(1)
    after    up: (B) (S(1)) -> (S(1))     relu takes it so; down, ... as they are

A pin changes the decisions for the modules of the pinned tensors (forward, backward and update,
with their parameters and states) and for every user of a pinned value, through views too. All other
decisions stay, and boxing joins the two parts. So this works for the strategy of any planner, and
takes much less time than planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbp_core.graph.ir import GraphInput, LogicalGraph, Node, Phase
from sbp_core.infer.axis import decide_axis
from sbp_core.infer.pins import Pins, PinValue, resolve_pins
from sbp_core.infer.revision import with_decision, work_of
from sbp_core.infer.solve import check_legal
from sbp_core.infer.work import Decision, FixedDecisions
from sbp_core.signatures.views import is_view
from sbp_core.strategy import Strategy

if TYPE_CHECKING:
    from sbp_core.plan_request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearby:
    """A strategy that satisfies some pins, and the modules that it changes.

    Args:
        strategy: Legal for the graph; its report is empty.
        modules: Paths of the modules that were decided again, sorted.
    """

    strategy: Strategy
    modules: tuple[str, ...]


def infer_nearby(
    request: PlanRequest, strategy: Strategy, pins: Mapping[str, PinValue] | None = None
) -> Nearby:
    """Return a strategy that satisfies pins, and otherwise equals another strategy where possible.

    Args:
        request: Graph, cluster, and pins of the user; its mesh is ignored.
        strategy: A legal strategy for the graph, of any planner.
        pins: Further pins, which the user's pins override.

    Raises:
        ConfigError: a pin does not apply to the graph.
        PlanError: nothing satisfies the pins; the message names what would be accepted.
    """
    graph = request.graph
    work = work_of(request, strategy)
    resolved = resolve_pins(graph, work.axes, pins or {}, request.pins)
    modules = _modules(graph, resolved)
    nodes = _decided_nodes(graph, resolved, modules)
    kept = FixedDecisions(
        nodes={
            name: found.signature for name, found in strategy.nodes.items() if name not in nodes
        },
        storage={
            entry.name: strategy.storage[entry.name].sbp
            for entry in work.inputs
            if _owner(entry) not in modules
        },
    )
    decision = Decision()
    for axis in range(len(work.axes)):
        decide_axis(work, decision, axis, resolved, kept)
    check_legal(work, decision)
    return Nearby(strategy=with_decision(strategy, decision), modules=tuple(sorted(modules)))


def _modules(graph: LogicalGraph, pins: Pins) -> set[str]:
    """Return the modules that the tensors of pins belong to."""
    found: set[str] = set()
    for name in {name for name, _ in (*pins.storage, *pins.use)}:
        entry = graph.input_kinds.get(name)
        found.add(_owner(entry) if entry else _module(graph.producers[name]))
    return found


def _decided_nodes(graph: LogicalGraph, pins: Pins, modules: set[str]) -> set[str]:
    """Return the nodes of modules, and those that take a pinned value, through views too."""
    found = {node.name for node in graph.nodes if _module(node) in modules}
    todo = [value for value, _ in pins.use]
    while todo:
        value = todo.pop()
        if (maker := graph.producers.get(value)) is not None:
            found.add(maker.name)
        for user in graph.users[value]:
            if user.name not in found and is_view(user.op):
                todo += user.outputs
            found.add(user.name)
    return found


def _module(node: Node) -> str:
    """Return the module of a node; for a node of the update, the module of its parameter."""
    if node.phase is not Phase.OPTIMIZER:
        return node.module
    parameter, is_update, _ = node.name.partition(".update.")
    return parameter.rpartition(".")[0] if is_update else node.module


def _owner(entry: GraphInput) -> str:
    """Return the module of an input; for an optimizer state, the module of its parameter."""
    return (entry.of or entry.name).rpartition(".")[0]
