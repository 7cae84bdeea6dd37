"""Write the lines of a printed plan on memory savings: sliced parameters, and recomputation.

A sliced parameter is gathered in parts. `report.memory_lines` shows the resulting memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.graph import GraphInput, LogicalGraph, Node
from sbp_core.passes import recompute_report
from sbp_core.sbp import Split
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes


def saving_lines(graph: LogicalGraph, strategy: Strategy) -> list[str]:
    """Return lines on what is sliced and recomputed; no line if nothing is."""
    return [*_slice_lines(graph, strategy), *_recompute_lines(graph)]


def _recompute_lines(graph: LogicalGraph) -> Iterator[str]:
    report = recompute_report(graph)
    if report.modules:
        yield f"recomputation, of one micro-batch on all ranks together: {report}"


def _slice_lines(graph: LogicalGraph, strategy: Strategy) -> Iterator[str]:
    """Yield the sizes of slices that are sent, then the parameters that are sent whole."""
    whole: list[int] = []
    parts: list[int] = []
    for entry in graph.inputs:
        pieces = _pieces(graph, entry)
        if not pieces:
            continue
        stored = strategy.storage[entry.name].sbp
        taken = {strategy.nodes[node.name].signature.inputs[0] for node in pieces}
        if not any(isinstance(sbp, Split) for sbp in stored):
            yield (
                f"slices of {entry.name}: it is whole on every rank, so only its gradient is "
                f"communicated in parts"
            )
        elif taken != {stored}:
            counts = sorted({node.num_slices for node in pieces})
            yield (
                f"slices of {entry.name} save nothing: it is gathered whole; its shards {stored} "
                f"of {graph.tensor(entry.name).shape} do not have {counts[0]} equal parts"
            )
        else:
            whole.append(graph.tensor(entry.name).size_bytes)
            parts += [graph.tensor(node.outputs[0]).size_bytes for node in pieces]
    if whole:
        yield (
            f"slices: {len(whole)} parameters of up to {format_bytes(max(whole))} travel in parts "
            f"of up to {format_bytes(max(parts))}"
        )


def _pieces(graph: LogicalGraph, entry: GraphInput) -> list[Node]:
    """Return the nodes that slice an input; none for a token."""
    users = graph.users[entry.name]
    return [n for n in users if n.op == "sbp.piece" and n.inputs()[0] == entry.name]
