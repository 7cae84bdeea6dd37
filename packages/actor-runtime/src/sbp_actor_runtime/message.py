"""Messages that the worker threads and the session of the actor runtime exchange during a step.

Workers tell each other that a register (a buffer) is filled, or that a filling is used up. The
session orders steps, and workers report results. The classes only hold data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sbp_actor_runtime.commitment import Commitment
from sbp_core.boxing import Pending
from sbp_core.runtime import Trace, Watch, unwatched

#: A thread of the plan: rank, name of the thread.
ThreadId = tuple[int, str]

#: Tensors and host numbers by key (name of a value on a rank).
Values = dict[str, Any]


class PendingResult:
    """The future result of a boxing actor, from its start on; the first user waits for it.

    Until then it keeps the input shard alive.

    Args:
        pending: The communicator's handle of the running step.
        shard: The input of the boxing step.
    """

    __slots__ = ("_pending", "_shard", "_value")

    def __init__(self, pending: Pending, shard: Any) -> None:
        self._pending: Pending | None = pending
        self._shard = shard
        self._value: Any = None

    @property
    def is_open(self) -> bool:
        """Whether nobody has waited for it yet."""
        return self._pending is not None

    def wait(self) -> Any:
        """Wait for the result and return it."""
        if self._pending is not None:
            self._value = self._pending.wait()
            self._pending = self._shard = None
        return self._value


def value_of(value: Any) -> Any:
    """Return a value; wait for it first if it is a `PendingResult`."""
    return value.wait() if isinstance(value, PendingResult) else value


@dataclass(frozen=True, slots=True)
class FilledRegister:
    """Message that a register was filled: its values, for one consumer.

    All consumers of a filling get the same dict, so nobody may change it.
    """

    register: str
    consumer: str
    values: Values


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Message that a consumer is finished with the oldest filling of a register or link."""

    register: str
    consumer: str


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Order to run one step.

    Args:
        index: Number of the step, from 0; equal on all ranks.
        states: The rank's states by name.
        fed: Batch parts and scalars by name, for each micro-batch.
        deadline_s: Seconds that one boxing step may wait for other ranks.
        commitment: Commit or abort of the step, shared by all threads of the process.
        watch: Makes the context manager around a rank's work.
        trace: Recorder of firings and waits; None if the step is not traced.
        only_finite: Whether the step ends before it overwrites a state, if its loss is not finite.
        before_overwrite: Called with a state before it is overwritten, if a snapshot is copied.
    """

    index: int
    states: Mapping[str, Any]
    fed: list[Values]
    deadline_s: float
    commitment: Commitment = field(default_factory=Commitment)
    watch: Watch = unwatched
    trace: Trace | None = None
    only_finite: bool = False
    before_overwrite: Callable[[str], None] | None = None


class Stop:
    """Order to end the thread, even in the middle of a step."""


@dataclass(slots=True)
class WorkerReport:
    """Results, new states or failure of one thread's step.

    Args:
        thread: The thread that reports.
        results: Losses and metrics by name.
        new_states: States by name, not yet in force.
        error: The failure, if any.
        actor: The actor that failed.
        has_refused: Whether the thread ended before it overwrote a state, because the loss is not
            finite.
        stopped: Whether the session stopped the thread, so that its failure is not a cause.
    """

    thread: ThreadId
    results: dict[str, Tensor] = field(default_factory=dict)
    new_states: Values = field(default_factory=dict)
    error: BaseException | None = None
    actor: str = ""
    has_refused: bool = False
    stopped: bool = False


Message = FilledRegister | Acknowledge | StepOrder | Stop
