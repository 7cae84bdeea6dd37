"""A backend that simulates a slower link: every collective takes α + β·bytes longer.

A pending collective does not end earlier, while its rank may compute. A link carries one collective
at a time, so collectives that begin together queue as on a real link. Transfers between stages are
not delayed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sbp_core.boxing import BoxingBackend, BoxingStep, Communicator, Delivery, Pending


class DelayedCommunicator(Communicator):
    """Delays the collectives of another communicator.

    Args:
        inner: The communicator that moves the data.
        latency_s, s_per_byte: α and β, each >= 0; may be changed between steps.
    """

    def __init__(self, inner: Communicator, latency_s: float, s_per_byte: float) -> None:
        self._inner, self.rank, self.device = inner, inner.rank, inner.device
        self.latency_s, self.s_per_byte = latency_s, s_per_byte
        self.num_calls, self.moved_bytes = 0, 0.0
        self._free_s = 0.0

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]  # of the other one, only read here
        return self._inner.sent_bytes

    def collective(self, step: BoxingStep, shard: Tensor, **how: Any) -> Tensor:
        """See `Communicator.collective`."""
        return self.begin(step, shard, **how).wait()

    def begin(self, step: BoxingStep, shard: Tensor, **how: Any) -> Pending:
        """See `Communicator.begin`."""
        ready_s = self._occupy(step.size_bytes / len(step.group(self.rank)))
        return _Later(self._inner.begin(step, shard, **how), ready_s)

    def progress(self) -> None:
        """See `Communicator.progress`."""
        self._inner.progress()

    def send(self, step: BoxingStep, shard: Tensor, **how: Any) -> Delivery:
        """See `Communicator.send`."""
        return self._inner.send(step, shard, **how)

    def receive(self, step: BoxingStep, shard: Tensor | None, **how: Any) -> Tensor:
        """See `Communicator.receive`."""
        return self._inner.receive(step, shard, **how)

    def begin_receive(self, step: BoxingStep, shard: Tensor | None, **how: Any) -> Pending:
        """See `Communicator.begin_receive`."""
        return self._inner.begin_receive(step, shard, **how)

    def _occupy(self, size_bytes: float) -> float:
        """Reserve the link for a collective when it is free; return the time of its end."""
        taken_s = self.latency_s + self.s_per_byte * size_bytes
        self._free_s = max(time.perf_counter(), self._free_s) + taken_s
        self.num_calls, self.moved_bytes = self.num_calls + 1, self.moved_bytes + size_bytes
        return self._free_s


class _Later(Pending):
    def __init__(self, inner: Pending, ready_s: float) -> None:
        self._inner, self._ready_s = inner, ready_s

    def wait(self) -> Tensor:
        found = self._inner.wait()
        time.sleep(max(0.0, self._ready_s - time.perf_counter()))
        return found


class DelayedBackend(BoxingBackend):
    """A backend whose communicators are delayed; see `DelayedCommunicator`."""

    def __init__(self, inner: BoxingBackend) -> None:
        self._inner = inner
        self.delayed: dict[int, DelayedCommunicator] = {}

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> Any:
        """See `BoxingBackend.launch_specs`."""
        return self._inner.launch_specs(num_ranks, command)

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`."""
        self._inner.open(ranks)

    def local_ranks(self) -> tuple[int, ...]:
        """See `BoxingBackend.local_ranks`."""
        return self._inner.local_ranks()

    def communicator(self, rank: int) -> Communicator:
        """See `BoxingBackend.communicator`."""
        if rank not in self.delayed:
            self.delayed[rank] = DelayedCommunicator(self._inner.communicator(rank), 0.0, 0.0)
        return self.delayed[rank]

    def fail(self, error: BaseException) -> None:
        """See `BoxingBackend.fail`."""
        self._inner.fail(error)

    def failure_reason(self) -> str:
        """See `BoxingBackend.failure_reason`."""
        return self._inner.failure_reason()

    def survivors(self, limit_s: float) -> Any:
        """See `BoxingBackend.survivors`."""
        return self._inner.survivors(limit_s)

    def close(self) -> None:
        """See `BoxingBackend.close`."""
        self._inner.close()
