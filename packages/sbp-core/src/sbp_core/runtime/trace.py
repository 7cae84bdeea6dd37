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
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

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
