"""Record a trace of steps: when each thread of each rank did what, and the bytes that ranks held.

    session.trace = trace = Trace()
    session.step(batch, scalars)
    session.trace = None
    for span in trace.spans: ...

A firing is one execution of an actor (a segment of operators, or a boxing step). A runtime records
a span for each firing and each wait. Times are wall-clock times, which are comparable between the
processes of a host. `measured_operators` computes operator times from a trace.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from sbp_core.cost import local_call, operator_work
from sbp_core.graph import LogicalGraph
from sbp_core.operators import MeasuredOperator
from sbp_core.signatures import OpCall, work_flop
from sbp_core.strategy import Strategy

if TYPE_CHECKING:
    from sbp_core.tensor import Tensor


class SpanKind(StrEnum):
    """The activity of a thread of a rank in a span.

    `FIRING`: one execution of an actor. `BLOCKED`: the wait before a firing, for data or for free
    places in the outputs (credits). `TURN`: inside a firing, the wait until another rank of the
    process has computed. `OPERATOR`: inside a firing, one operator call, with freeing values.
    """

    FIRING = "firing"
    BLOCKED = "blocked"
    TURN = "turn"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a thread did one thing.

    Args:
        kind: The activity.
        rank, thread: The rank and its thread.
        step: The number of the step, from 0.
        actor, micro_batch: The firing; for a wait, the firing that waited.
        begin_ns, end_ns: Nanoseconds of the wall clock.
        waits_for: For a wait: data and credits that were missing when it began.
        node: For an operator: the node of the graph that calls it.
    """

    kind: SpanKind
    rank: int
    thread: str
    step: int
    actor: str
    micro_batch: int
    begin_ns: int
    end_ns: int
    waits_for: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that a rank held at a time, in nanoseconds of the wall clock."""

    rank: int
    time_ns: int
    num_bytes: int


class TensorMeter(Protocol):
    """Counts the live tensors of ranks; see `sbp_torch.memory.MemoryMeter`."""

    def note(self, rank: int, tensor: Tensor, *, handed: bool = False) -> None:
        """Count a tensor that a rank holds, until it is freed."""

    def alive(self, rank: int) -> int:
        """Return the bytes alive on a rank."""


class Trace:
    """Spans and bytes held, recorded by a runtime; several threads may record.

    A session whose `trace` is set records each firing and each wait at its end.

    Args:
        meter: Counts the tensors that exist between firings; None to count nothing. Tensors that
            exist only inside a firing are not counted.
        operators: Whether each operator is recorded, too. Reading the clock takes less than a tenth
            of a microsecond; on a GPU it waits for the operator, so that steps are slower.
    """

    now_ns = staticmethod(time.time_ns)

    def __init__(self, meter: TensorMeter | None = None, *, operators: bool = False) -> None:
        self.meter, self.operators = meter, operators
        self.spans: list[Span] = []
        self.held: list[MemorySample] = []

    def note(self, span: Span) -> None:
        """Add a span."""
        self.spans.append(span)

    def count(self, rank: int, made: Iterable[Any], *, handed: bool = False) -> None:
        """Count the results of a firing, and record the bytes that the rank holds now.

        Args:
            rank: The rank of the firing.
            made: The results; those that are not tensors are ignored.
            handed: Whether boxing made them; then their memory may belong to another rank.
        """
        if self.meter is None:
            return
        for value in made:
            if hasattr(value, "untyped_storage"):
                self.meter.note(rank, value, handed=handed)
        self.held.append(MemorySample(rank, self.now_ns(), self.meter.alive(rank)))


def measured_operators(
    graph: LogicalGraph, strategy: Strategy, spans: Iterable[Span]
) -> tuple[MeasuredOperator, ...]:
    """Return the times of the operator calls of a traced run, sorted by their text.

    A firing takes longer than its operators: it also waits for its turn if ranks are threads of one
    process, receives inputs and sends outputs. This overhead is divided among its operators in
    proportion to their times. For each rank the median over all firings counts, and of these the
    slowest rank, because the other ranks will wait for it.

        firing     | turn | aten.mm 30 us | aten.relu 10 us | hands on |     60 us in all
        shared out | aten.mm 45 us                | aten.relu 15 us    |

    Args:
        graph: The graph that ran.
        strategy: The strategy under which it ran.
        spans: The spans of all ranks, with operators; without these the result is empty.
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
