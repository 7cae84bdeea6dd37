"""Find the values that the forward phase saves for the backward phase, their bytes and work.

Sizes are sizes of whole logical tensors of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import ITEMSIZE, LogicalGraph, Node, Phase, Rate
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import work_flop


def is_forward(node: Node) -> bool:
    """Whether a node computes tensors in the forward phase, for each micro-batch."""
    return node.phase is Phase.FORWARD and node.rate is Rate.MICRO and not node.is_host


def call_flop(graph: LogicalGraph, node: Node) -> float:
    """Return the work of a node; of an operator without a rule, 1 for each element written."""
    try:
        return work_flop(OpCall.of(graph, node))
    except SignatureError:
        made = (graph.tensor(value) for value in node.outputs)
        return float(sum(kind.size_bytes // ITEMSIZE[kind.dtype] for kind in made))


def does_no_work(graph: LogicalGraph, node: Node) -> bool:
    """Whether a node takes no arithmetic, as views of its argument do."""
    return bool(graph.tensor_inputs(node)) and call_flop(graph, node) == 0


def bases_of(graph: LogicalGraph) -> Callable[[str], str]:
    """Return a function that maps a value to its base: the value whose memory it views, or itself.

    It examines each value once.
    """
    known: dict[str, str] = {}

    def base_of(value: str) -> str:
        views: list[str] = []
        while value not in known:
            node = graph.producers.get(value)
            if node is None or not does_no_work(graph, node):
                known[value] = value
                break
            views.append(value)
            value = graph.tensor_inputs(node)[0]
        base = known[value]
        known.update(dict.fromkeys(views, base))
        return base

    return base_of


def saved_values(graph: LogicalGraph) -> tuple[str, ...]:
    """Return the tensors of the forward phase that the backward phase uses; views as bases."""
    base_of = bases_of(graph)
    used = (
        base_of(value)
        for node in graph.nodes
        if node.phase is Phase.BACKWARD
        for value in graph.tensor_inputs(node)
    )
    producers = graph.producers
    return tuple(v for v in dict.fromkeys(used) if v in producers and is_forward(producers[v]))


def saved_bytes(graph: LogicalGraph) -> int:
    """Return the bytes of the activations that are kept from forward to backward."""
    return sum_bytes(graph, saved_values(graph))


def sum_bytes(graph: LogicalGraph, values: Iterable[str]) -> int:
    """Return the bytes of some tensors."""
    return sum(graph.tensor(value).size_bytes for value in values)


def made_bytes(graph: LogicalGraph, node: Node) -> int:
    """Return the bytes that a node makes: none if it is a view."""
    return 0 if does_no_work(graph, node) else sum_bytes(graph, node.outputs)
