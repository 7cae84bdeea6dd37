"""What threads tell each other: requests, acknowledgements, orders of the session, reports to it.

Plain values; nothing here acts.
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

#: Tensors and host numbers by key.
Values = dict[str, Any]


class PendingResult:
    """What a boxing actor makes, from its begin on; who needs it first waits for it.

    Until then it holds the shard that it is made of.

    Args:
        pending: Of the communicator.
        shard: What it was begun with.
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
        """Return the value, once it is there."""
        if self._pending is not None:
            self._value = self._pending.wait()
            self._pending = self._shard = None
        return self._value


def value_of(value: Any) -> Any:
    """Return a value, once it is there."""
    return value.wait() if isinstance(value, PendingResult) else value


@dataclass(frozen=True, slots=True)
class FilledRegister:
    """A register was filled: its values, for one consumer.

    All consumers of a filling are handed the same dict, so nobody may change it.
    """

    register: str
    consumer: str
    values: Values


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """A consumer is through with the oldest filling of a register or link."""

    register: str
    consumer: str


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Run one step.

    Args:
        index: Number of the step, from 0; equal on all ranks.
        states: The rank's states by name.
        fed: Batch parts and scalars by name, for each micro-batch.
        deadline_s: Seconds that one boxing step may wait for other ranks.
        commitment: Of the step, on all threads of the process.
        watch: Makes the context in which a rank's work is done.
        trace: Where firings and waits are noted, if the step is traced.
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
    """End the thread, in the middle of a step too."""


@dataclass(slots=True)
class WorkerReport:
    """What a thread's step gave: results, new states, or the failure.

    Args:
        thread: Whose report it is.
        results: Losses and metrics by name.
        new_states: States by name, not yet in force.
        error: The failure, if any.
        actor: The actor that failed.
        has_refused: Whether it ended before it overwrote a state, as the loss is not finite.
        stopped: Whether the thread was told to stop, so that it failed for no reason of its own.
    """

    thread: ThreadId
    results: dict[str, Tensor] = field(default_factory=dict)
    new_states: Values = field(default_factory=dict)
    error: BaseException | None = None
    actor: str = ""
    has_refused: bool = False
    stopped: bool = False


Message = FilledRegister | Acknowledge | StepOrder | Stop
