"""What ranks did when, in the steps that are traced: spans of firings and waits, bytes held, times.

    session.trace = trace = Trace()
    session.step(batch, scalars)
    session.trace = None
    for span in trace.spans: ...

Times are of the wall clock, which the processes of a host share.
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
    """What a thread of a rank does in a span.

    A `FIRING` is one of an actor. `BLOCKED` is the time before a firing in which data or credits
    are missing. `TURN` is a part of a firing: waiting until another rank of the process has
    computed. `OPERATOR` is one, too: the call of one operator, with freeing what dies after it.
    """

    FIRING = "firing"
    BLOCKED = "blocked"
    TURN = "turn"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a thread did one thing.

    Args:
        kind: What it did.
        rank, thread: Whose thread.
        step: Number of the step, from 0.
        actor, micro_batch: Which firing it was, or was waited with.
        begin_ns, end_ns: Nanoseconds of the wall clock.
        waits_for: Of a wait: data and credits that were missing when it began.
        node: Of an operator: the node of the graph that calls it.
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
    """Counts the tensors of ranks that are alive; see `sbp_torch.memory.MemoryMeter`."""

    def note(self, rank: int, tensor: Tensor, *, handed: bool = False) -> None:
        """Count a tensor that a rank holds, until it is gone."""

    def alive(self, rank: int) -> int:
        """Return the bytes alive on a rank."""


class Trace:
    """Spans and bytes held, recorded by a runtime; several threads may record.

    A session whose `trace` is set notes each firing and each wait when it is over.

    Args:
        meter: Counts what the firings leave; None to count nothing. What operators hold only
            inside a firing is not seen.
        operators: Whether each operator is noted, too. The clock between them takes less than a
            tenth of a microsecond; on a GPU it waits for the operator, so that steps are slower.
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
        """Count what a firing has made, and note what the rank holds now.

        Args:
            rank: Whose firing it was.
            made: Tensors, and values that are none.
            handed: Whether boxing made them, so that their storages may be another rank's.
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
    """Return what the calls of a traced run took, sorted by their text.

    A firing waits for its turn where ranks are threads of one process, and takes and hands on: that
    belongs to what it computes. So the time of a firing is shared out to its operators by what each
    of them takes. Of each rank the median of all firings counts, and of the ranks the slowest one,
    as the others will wait for it.

        firing     | turn | aten.mm 30 us | aten.relu 10 us | hands on |     60 us in all
        shared out | aten.mm 45 us                | aten.relu 15 us    |

    Args:
        graph: What ran.
        strategy: Under which it ran.
        spans: Of all ranks, with those of operators; without them nothing is found.
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
    """Return the seconds of each node on the slowest rank: of each rank the median."""
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
