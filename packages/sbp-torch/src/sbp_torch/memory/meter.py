"""`MemoryMeter`: count the bytes of live tensors of each rank while a session runs.

    meter = MemoryMeter(plan)
    with runtime.start(plan, states, meter.backend(LocalBackend())) as session:
        with meter.watching(session):
            session.step(batch, scalars)
    meter.peak(rank)

A storage counts for a rank as long as a tensor lives that the work of the rank made or received. So
ranks of one process are counted separately. If another rank made the storage, only the bytes of the
tensor count, because with one process per rank it would be a copy. Batches count by the plan's
slots. Scratch memory inside operators is invisible, because operators return no tensor of it.
States in host memory are not counted.

The meter makes every operator call about 50 µs slower. `sbp_launch` uses it for traces and reports.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import (
    BoxingBackend,
    BoxingStep,
    Communicator,
    Delivery,
    SurvivingRanks,
)
from sbp_core.compile import PhysicalPlan
from sbp_core.graph import InputKind
from sbp_core.memory import contiguous
from sbp_core.runtime import Session
from sbp_torch._torch_compat import OpOverload, storage_key
from sbp_torch.ops.operator_calls import OperatorCalls


class MemoryMeter:
    """The live tensors of every rank, and the peak of their bytes.

    Args:
        plan: The plan that the session runs.
        ranks: The ranks of this process; None for all ranks.
    """

    def __init__(self, plan: PhysicalPlan, ranks: Collection[int] | None = None) -> None:
        here = [part for part in plan.ranks if ranks is None or part.rank in ranks]
        self._lock = threading.RLock()
        self._owners: dict[int, int] = {}
        self._quiet = threading.local()
        self._ranks = {part.rank: _Holdings() for part in here}
        self._batch = {
            part.rank: plan.num_micro_batches
            * sum(
                contiguous(slot.local_shape, slot.dtype).size_bytes
                for slot in part.slots
                if slot.kind == InputKind.BATCH
            )
            for part in here
        }
        self._on_host = {slot.name for part in here for slot in part.slots if slot.offloaded}
        self._states = {
            part.rank: [slot.name for slot in part.slots if InputKind(slot.kind).is_state]
            for part in here
        }

    def peak(self, rank: int) -> int:
        """Return the peak of the live bytes of a rank, including its batch."""
        return self._ranks[rank].peak + self._batch[rank]

    def alive(self, rank: int) -> int:
        """Return the live bytes of a rank between steps."""
        return self._ranks[rank].alive

    def restart(self) -> None:
        """Forget the peaks so far."""
        with self._lock:
            for held in self._ranks.values():
                held.peak = held.alive

    def backend(self, inner: BoxingBackend) -> BoxingBackend:
        """Return a backend that gives every rank separate tensors, so that they can be counted."""
        return _Metered(inner, self)

    @contextmanager
    def watching(self, session: Session) -> Iterator[MemoryMeter]:
        """Count the tensors of a session inside the `with` block."""
        self.note_states(session)
        session.watch = lambda rank: OperatorCalls(partial(self._note_call, rank))
        try:
            yield self
        finally:
            del session.watch

    def note_states(self, session: Session) -> None:
        """Count the states of a session."""
        for rank, names in self._states.items():
            for name in names:
                value = session.shard(name, rank)
                if isinstance(value, Tensor):
                    note = self.came_from_outside if name in self._on_host else self.note
                    note(rank, value)

    def _note_call(
        self, rank: int, op: OpOverload, inputs: Sequence[Any], results: Sequence[Any]
    ) -> None:
        # Runtimes give a rank its part by `detach`, which graphs do not contain.
        handed = op is torch.ops.aten.detach.default
        for value in () if handed else inputs:
            if isinstance(value, Tensor):
                self.came_from_outside(rank, value)
        for value in results:
            if isinstance(value, Tensor):
                self.note(rank, value, handed=handed)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Count no tensors that this thread makes inside the `with` block."""
        self._quiet.on = True
        try:
            yield
        finally:
            self._quiet.on = False

    def note(self, rank: int, tensor: Tensor, *, handed: bool = False) -> None:
        """Count a tensor of a rank until it is freed.

        Args:
            rank: The rank that holds the tensor.
            tensor: The tensor.
            handed: Whether the rank received it: then only its own bytes count, not its storage's.
        """
        if getattr(self._quiet, "on", False):
            return
        held, number, storage = self._ranks[rank], id(tensor), storage_key(tensor)
        with self._lock:
            if number in held.tensors or storage in held.outside:
                return
            foreign = self._owners.setdefault(storage, rank) != rank
            shown = foreign or handed
            size = tensor.nbytes if shown else tensor.untyped_storage().nbytes()

            def gone(_: object) -> None:
                with self._lock:
                    held.tensors.pop(number, None)
                    held.holders[storage] -= 1
                    if not held.holders[storage]:  # the last tensor of the storage
                        del held.holders[storage]
                        held.alive -= held.sizes.pop(storage)
                        if self._owners.get(storage) == rank:
                            del self._owners[storage]

            held.tensors[number] = weakref.ref(tensor, gone)
            if storage not in held.holders:
                held.holders[storage], held.sizes[storage] = 0, size
                held.alive += size
                held.peak = max(held.peak, held.alive)
            held.holders[storage] += 1

    def came_from_outside(self, rank: int, tensor: Tensor) -> None:
        """Note an uncounted argument, such as a part of the batch, which counts by the plan."""
        if getattr(self._quiet, "on", False):
            return
        held, storage = self._ranks[rank], storage_key(tensor)
        with self._lock:
            if storage in held.holders or storage in held.outside:
                return
            held.outside[storage] = weakref.ref(tensor, lambda _: held.outside.pop(storage, None))


class _Holdings:
    """Tensors of one rank: by id; and number of tensors and bytes by storage."""

    def __init__(self) -> None:
        self.tensors: dict[int, weakref.ref[Tensor]] = {}
        self.outside: dict[int, weakref.ref[Tensor]] = {}
        self.holders: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.alive = self.peak = 0


class _Metered(BoxingBackend):
    """A backend whose results are separate tensors, one for each rank."""

    def __init__(self, inner: BoxingBackend, meter: MemoryMeter) -> None:
        self.inner, self.meter = inner, meter
        self.spans_processes = inner.spans_processes

    def open(self, ranks: Sequence[int]) -> None:
        self.inner.open(ranks)

    def local_ranks(self) -> tuple[int, ...]:
        return self.inner.local_ranks()

    def communicator(self, rank: int) -> Communicator:
        return _MeteredCommunicator(self.inner.communicator(rank), self)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def failure_reason(self) -> str:
        return self.inner.failure_reason()

    def survivors(self, limit_s: float) -> SurvivingRanks:
        return self.inner.survivors(limit_s)

    def close(self) -> None:
        self.inner.close()


class _MeteredCommunicator(Communicator):
    """A communicator that returns separate tensors.

    Temporary tensors that threads of one process make for each other belong to no rank, and are not
    counted.
    """

    def __init__(self, inner: Communicator, backend: _Metered) -> None:
        self.rank, self.inner, self.backend = inner.rank, inner, backend
        self.device = inner.device

    @property
    def sent_bytes(self) -> int:  # type: ignore[override] # read only: from the inner one
        """Bytes that the inner communicator has sent."""
        return self.inner.sent_bytes

    def collective(self, step: BoxingStep, shard: Tensor, **how: Any) -> Tensor:
        with self._within():
            made: Tensor = self.inner.collective(step, shard, **how)
        return made.detach()

    def send(self, step: BoxingStep, shard: Tensor, **how: Any) -> Delivery:
        return self.inner.send(step, shard, **how)

    def receive(self, step: BoxingStep, shard: Tensor | None, **how: Any) -> Tensor:
        with self._within():
            made: Tensor = self.inner.receive(step, shard, **how)
        return made.detach()

    @contextmanager
    def _within(self) -> Iterator[None]:
        with nullcontext() if self.backend.spans_processes else self.backend.meter.looking_away():
            yield
