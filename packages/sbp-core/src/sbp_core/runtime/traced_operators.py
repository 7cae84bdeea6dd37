"""Compute the times of operators from a trace of training steps, to plan with measured times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from sbp_core.cost import local_call, operator_work
from sbp_core.graph import LogicalGraph
from sbp_core.operators import MeasuredOperator
from sbp_core.runtime.trace import Span, SpanKind
from sbp_core.signatures import OpCall, work_flop
from sbp_core.strategy import Strategy


def measured_operators(
    graph: LogicalGraph, strategy: Strategy, spans: Iterable[Span]
) -> tuple[MeasuredOperator, ...]:
    """Return the times of the operators of a traced run, sorted by the text of their calls.

    A firing (one execution of an actor) takes longer than its operators: it also waits for its
    turn, receives inputs and sends outputs. This overhead is divided among its operators in
    proportion to their times. For each rank the median over all firings counts, and of these the
    slowest rank, because the other ranks wait for it.

        firing     | turn | aten.mm 30 us | aten.relu 10 us | sends    |     60 us in all
        result     | aten.mm 45 us                | aten.relu 15 us    |

    Args:
        graph: The graph that ran.
        strategy: Its strategy.
        spans: Spans of all ranks. Without spans of operators, the result is empty.
    """
    times_s: dict[str, list[float]] = defaultdict(list)
    found: dict[str, MeasuredOperator] = {}
    for name, time_s in _node_times(spans).items():
        if name not in strategy.nodes:
            continue  # a step of boxing that computes
        assigned = strategy.nodes[name]
        call = OpCall.of(graph, graph.by_name[name])
        mesh_shape = strategy.stages[assigned.stage].mesh_shape
        key = local_call(call, assigned.signature, mesh_shape)
        work = operator_work(call, assigned.signature, mesh_shape, work_flop(call))
        found[key] = MeasuredOperator(
            call=key, dtype=work.dtype, flop=work.flop, num_bytes=work.num_bytes, time_s=0.0
        )
        times_s[key].append(time_s)
    return tuple(replace(found[key], time_s=median(times_s[key])) for key in sorted(found))


def _node_times(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each node on the slowest rank, from the median of each rank."""
    firings_ns: dict[tuple[int, str, int, int], int] = {}
    operators: dict[tuple[int, str, int, int], Counter[str]] = defaultdict(Counter)
    for span in spans:
        key = span.rank, span.actor, span.step, span.micro_batch
        took_ns = span.end_ns - span.begin_ns
        if span.kind is SpanKind.FIRING:
            firings_ns[key] = took_ns
        elif span.kind is SpanKind.OPERATOR:
            operators[key][span.node] += took_ns
    times_s: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, by_node in operators.items():
        share = firings_ns[key] / max(1, by_node.total())
        for node, took_ns in by_node.items():
            times_s[node][key[0]].append(took_ns * share * 1e-9)
    return {node: max(map(median, by_rank.values())) for node, by_rank in times_s.items()}
