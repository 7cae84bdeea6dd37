"""What ranks did when, in the steps that are traced: spans of firings and waits, bytes held, times.

    session.trace = trace = Trace()
    session.step(batch, scalars)
    session.trace = None
    for span in trace.spans: ...

Times are of the wall clock, which the processes of a host share.
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
