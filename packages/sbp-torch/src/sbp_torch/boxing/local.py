"""The `local` backend of collectives: ranks are threads of one process, and share tensors.

A collective is a rendezvous: each rank brings its shard. The last rank to arrive divides the work
into blocks, other ranks help (`share`), and all leave when the work is done:

             all arrive by the deadline     then no rank is late any more
    rank 0   brings its shard, waits        woken: does blocks, waits     gets its result
    rank 1      brings its shard, waits     sleeps                        gets its result
    rank 2         arrives last             divides, wakes, does blocks   gets its result

`begin` brings the shard, and the last rank also divides; waiting ranks do the work. Ranks arrive in
any order, so any rank may divide, but the order of additions is fixed.

A transfer goes through a mailbox, in order of sending. Tensors are shared instead of copied if
possible, and a sum is computed once, in mesh order. The owner of a shard must not change it until
the step is over. Several ranks read the results, so no rank may write to them.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sbp_core.boxing import (
    BoxingBackend,
    BoxingStep,
    CollectiveCall,
    Communicator,
    Delivered,
    Delivery,
    Pending,
    StepKind,
    TransferPiece,
    transfer_pieces,
)
from sbp_core.errors import BoxingError, words_of
from sbp_torch.boxing.buffer_pool import BufferPool
from sbp_torch.boxing.execute import check_shard, combine, detach_shard
from sbp_torch.boxing.share import SharedStep, share_out

if TYPE_CHECKING:
    from sbp_core.plugins import EmptyConfig

#: The key of a collective: the tag, and the ranks of its group.
_Key = tuple[str, tuple[int, ...]]

#: One message: the pieces that one rank sends another in one transfer.
_Message = list[tuple[TransferPiece, torch.Tensor]]


class _Rendezvous:
    """One collective of one group, from the first arrival until the last rank has left.

    It is read and written under the lock of the backend. Three things need no lock: the contents of
    `work`, `work` itself after it is set, and `error` after the rendezvous is over.
    """

    def __init__(self, step: BoxingStep, lock: threading.Lock) -> None:
        self.step = step
        self.changed = threading.Condition(lock)
        self.shards: dict[int, torch.Tensor] = {}
        self.donated: list[int] = []
        #: The work, once all ranks have arrived; and how many of its blocks are not done.
        self.work: SharedStep | None = None
        self.num_left = 0
        self.error: BoxingError | None = None
        #: Whether the backend failed or was closed before all ranks had arrived.
        self.stopped = False
        #: If it failed: the ranks that have not arrived yet; they get the error when they do.
        self.not_told: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """Whether no rank is awaited any more: all have arrived, or it failed or was stopped."""
        return self.work is not None or self.error is not None or self.stopped

    @property
    def over(self) -> bool:
        """Whether the results are finished, or an error has ended the rendezvous."""
        return self.num_left == 0 or self.error is not None


#: A collective at which a rank has arrived: its key, and the rendezvous.
_Arrival = tuple[_Key, _Rendezvous]


class LocalBackend(BoxingBackend):
    """Boxing among the threads of one process."""

    spans_processes = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: tuple[int, ...] = ()
        self._communicators: dict[int, LocalCommunicator] = {}
        self._rendezvous: dict[_Key, _Rendezvous] = {}
        self._mail: dict[tuple[str, int, int], deque[_Message]] = {}
        self._mail_came: dict[int, threading.Condition] = {}
        self._buffers = BufferPool()
        #: How many sleeping ranks are woken to do blocks: as many as there are other cores, because
        #: more threads would only compete for the cores.
        self._num_helpers = _num_cores() - 1
        #: Why the backend cannot be used any more, and the cause.
        self._end: tuple[str, BaseException | None] | None = None

    def open(self, ranks: Sequence[int]) -> None:
        """Make a communicator for each of `ranks`, which are all in this process.

        Raises:
            BoxingError: the backend is already open or was closed, or a rank repeats.
        """
        with self._lock:
            if self._end is not None:
                raise BoxingError(self._end[0], todo="build a new one") from self._end[1]
            if self._ranks or len(set(ranks)) != len(ranks):
                raise BoxingError(
                    f"cannot open the local backend on ranks {list(ranks)}"
                    + (f": it is open on {list(self._ranks)}" if self._ranks else ""),
                    accepted="distinct ranks, once",
                )
            self._ranks = tuple(ranks)
            self._communicators = {rank: LocalCommunicator(self, rank) for rank in ranks}
            self._mail_came = {rank: threading.Condition(self._lock) for rank in ranks}

    def local_ranks(self) -> tuple[int, ...]:
        """Return all ranks: they are all in this process."""
        return self._ranks

    def communicator(self, rank: int) -> LocalCommunicator:
        """Return the communicator of a rank; the same on every call.

        Raises:
            BoxingError: the backend was not opened with this rank.
        """
        if rank not in self._communicators:
            raise BoxingError(
                f"rank {rank} is not on this backend",
                accepted=", ".join(map(str, self._ranks)) or "none: the backend is not open",
            )
        return self._communicators[rank]

    def fail(self, error: BaseException) -> None:
        """Unblock every waiting call with a `BoxingError` caused by `error`."""
        atexit.register(gc.freeze)  # see `Connections._break`
        self._stop(f"another part of the run failed: {words_of(error)}", error)

    def close(self) -> None:
        """Drop all pending work; further calls raise `BoxingError`."""
        self._stop("the local boxing backend is closed", None)
        with self._lock:
            self._mail.clear()
        self._buffers.clear()

    def _stop(self, reason: str, cause: BaseException | None) -> None:
        with self._lock:
            self._end = self._end or (reason, cause)
            for rendezvous in self._rendezvous.values():
                rendezvous.stopped = True
                rendezvous.changed.notify_all()
            self._rendezvous.clear()
            for came in self._mail_came.values():
                came.notify_all()

    def _check_usable(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if the backend has failed or was closed."""
        if self._end is not None:
            reason, cause = self._end
            raise call.failed(reason) from cause

    def arrive(self, call: CollectiveCall, shard: torch.Tensor, donate: bool) -> _Arrival:
        """Bring a shard to the rendezvous of a collective; the last rank divides the work."""
        step, rank = call.step, call.rank
        group = step.group(rank)
        key = (call.tag, group)
        with self._lock:
            self._check_usable(call)
            rendezvous = self._rendezvous.get(key)
            if rendezvous is None:
                rendezvous = self._rendezvous[key] = _Rendezvous(step, self._lock)
            if rendezvous.error is None and rendezvous.step != step:
                error = BoxingError(
                    f"ranks use the tag {call.tag!r} for different steps",
                    where=(f"rank {rank}: {step}", f"others: {rendezvous.step}"),
                    accepted="one step for each tag and group",
                )
                self._fail_rendezvous(key, rendezvous, error)
            if rendezvous.error is not None:
                # It failed before this rank arrived. It stays until all ranks have got the error;
                # otherwise the next rank would wait in vain at a new rendezvous.
                rendezvous.not_told.discard(rank)
                if not rendezvous.not_told:
                    self._rendezvous.pop(key, None)
                raise _copy_of(rendezvous.error)
            rendezvous.shards[rank] = shard
            if donate:
                rendezvous.donated.append(rank)
            is_last = len(rendezvous.shards) == len(group)
            if is_last:
                # A fast rank may use the tag again before other ranks are awake. They hold the
                # object itself.
                del self._rendezvous[key]
        if is_last:
            self._divide(rendezvous, group)
        return key, rendezvous

    def finish(self, call: CollectiveCall, arrival: _Arrival) -> tuple[torch.Tensor, int]:
        """Wait for the other ranks, and do a share of the work; see `Communicator.collective`.

        Returns:
            The rank's result, and the bytes that it sent to other ranks.
        """
        key, rendezvous = arrival
        if not rendezvous.is_settled:
            with self._lock:
                self._await(call, key, rendezvous)
        elif rendezvous.stopped:
            self._check_usable(call)
        return self._take_part(rendezvous, call.rank)

    def _await(self, call: CollectiveCall, key: _Key, rendezvous: _Rendezvous) -> None:
        """Wait, holding the lock, until the work is divided; fail the rendezvous at the deadline.

        A rank that is not woken to help sleeps until all work is done.
        """
        full = len(key[1])
        while not rendezvous.is_settled:
            if len(rendezvous.shards) == full:
                # All ranks have arrived, and the last one divides the work: no rank is missing.
                rendezvous.changed.wait()
            elif call.is_over or not rendezvous.changed.wait(call.left_s):
                if rendezvous.is_settled or len(rendezvous.shards) == full:
                    continue  # the time was over, but another rank took the lock first
                missing = [other for other in key[1] if other not in rendezvous.shards]
                self._fail_rendezvous(key, rendezvous, call.missing(missing))
        if rendezvous.stopped:
            self._check_usable(call)

    def _fail_rendezvous(self, key: _Key, rendezvous: _Rendezvous, error: BoxingError) -> None:
        """End a rendezvous with an error; it stays until late ranks have got the error, too."""
        rendezvous.error = error
        rendezvous.not_told = set(key[1]) - rendezvous.shards.keys()
        rendezvous.shards.clear()
        rendezvous.changed.notify_all()

    def _divide(self, rendezvous: _Rendezvous, group: tuple[int, ...]) -> None:
        """Divide the work and wake other ranks to help; called by the last rank to arrive.

        This runs without the lock, so that other groups can continue. No other rank writes to this
        rendezvous, because all of its ranks have arrived and only wait.
        """
        work, error = None, None
        try:
            work = share_out(
                rendezvous.step, group, rendezvous.shards, rendezvous.donated, self._buffers
            )
        except BaseException as caught:  # after any error, other ranks must not wait forever
            error = _as_boxing_error(rendezvous.step, caught)
        with self._lock:
            rendezvous.work, rendezvous.error = work, error
            rendezvous.num_left = 0 if work is None else work.num_blocks
            rendezvous.shards = {}
            if rendezvous.over:
                rendezvous.changed.notify_all()
            elif work is not None and work.needs_help:
                rendezvous.changed.notify(self._num_helpers)

    def _take_part(self, rendezvous: _Rendezvous, rank: int) -> tuple[torch.Tensor, int]:
        """Do blocks until all are done; return the results of `finish`."""
        work, done, error = rendezvous.work, 0, None
        if work is not None and work.num_blocks:
            try:
                done = work.do()
            except BaseException as caught:
                error = _as_boxing_error(rendezvous.step, caught)
            with self._lock:
                # If no block is left to take, another rank may still be working on one. The rank
                # that finishes last wakes all ranks, including those that were not woken to help.
                rendezvous.num_left -= done
                rendezvous.error = rendezvous.error or error
                if rendezvous.over:
                    rendezvous.changed.notify_all()
                while not rendezvous.over:
                    # The other ranks compute, so no rank is missing and no deadline applies.
                    rendezvous.changed.wait()
        if rendezvous.error is not None:
            raise _copy_of(rendezvous.error)
        assert work is not None, "a rendezvous ends with results or an error"
        return work.results[rank], work.sent_bytes[rank]

    def post(self, call: CollectiveCall, messages: dict[int, _Message]) -> None:
        """Put messages into the mailboxes of their receivers.

        A message contains slices of the sender's shard, not copies: the sender must not change the
        shard until the step is over on every rank.
        """
        with self._lock:
            self._check_usable(call)
            for receiver, message in messages.items():
                if receiver not in self._mail_came:
                    raise BoxingError(
                        f"rank {call.rank} sends to rank {receiver}, which is not on this backend",
                        accepted=", ".join(map(str, self._ranks)),
                    )
                self._mail.setdefault((call.tag, call.rank, receiver), deque()).append(message)
                self._mail_came[receiver].notify_all()

    def collect(self, call: CollectiveCall, senders: Sequence[int]) -> dict[int, _Message]:
        """Wait for one message from each sender and take the messages out of the mailbox."""
        keys = {sender: (call.tag, sender, call.rank) for sender in senders}

        def come() -> bool:
            return self._end is not None or all(key in self._mail for key in keys.values())

        with self._lock:
            in_time = self._mail_came[call.rank].wait_for(come, call.left_s)
            self._check_usable(call)
            if not in_time:
                raise call.missing(sender for sender, key in keys.items() if key not in self._mail)
            messages: dict[int, _Message] = {}
            for sender, key in keys.items():
                messages[sender] = self._mail[key].popleft()
                if not self._mail[key]:
                    del self._mail[key]
            return messages


class LocalCommunicator(Communicator):
    """Executes boxing steps for one rank, which is a thread of this process.

    `sent_bytes` counts the slices that other ranks really get, not the predictions of steps: see
    `share_out` for collectives; for transfers it counts the slices in messages.
    """

    def __init__(self, backend: LocalBackend, rank: int) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._backend = backend

    def collective(
        self,
        step: BoxingStep,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> torch.Tensor:
        """Wait for the step's group, and do this rank's share of the work."""
        pending = self.begin(step, shard, tag=tag, deadline_s=deadline_s, donate=donate)
        result: torch.Tensor = pending.wait()
        return result

    def begin(
        self,
        step: BoxingStep,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> Pending:
        """Bring the shard to the step's group; the work is done when the result is requested."""
        if step.kind in (StepKind.TRANSFER, StepKind.LOCAL):
            raise BoxingError(f"a {step.kind.value} step is no collective", where=str(step))
        self._check_rank(step, self.rank in step.source[0])
        call = CollectiveCall.begin(step, tag, self.rank, deadline_s)
        arrival = self._backend.arrive(call, detach_shard(shard), donate)
        return _LocalPending(self, call, arrival)

    def finish(self, call: CollectiveCall, arrival: _Arrival) -> torch.Tensor:
        """Return the result of a collective that was begun."""
        result, sent_bytes = self._backend.finish(call, arrival)
        # In one statement, as in `send`.
        self.sent_bytes += sent_bytes
        return result

    def send(
        self, step: BoxingStep, shard: torch.Tensor, *, tag: str, deadline_s: float
    ) -> Delivery:
        """Put this rank's pieces, without copies, into the receivers' mailboxes; never wait."""
        self._check_rank(step, self.rank in step.source[0])
        check_shard(step, self.rank, shard)
        shard = detach_shard(shard)
        messages: dict[int, _Message] = {}
        for piece in transfer_pieces(step):
            if piece.sender == self.rank != piece.receiver:
                part = (piece, shard[piece.source_slices])
                messages.setdefault(piece.receiver, []).append(part)
        self._backend.post(CollectiveCall.begin(step, tag, self.rank, deadline_s), messages)
        sent_bytes = sum(part.nbytes for message in messages.values() for _, part in message)
        # There is no call between reading and writing, because at a call Python may switch threads,
        # and the count of the other thread would be lost. A rank may send on one thread and reduce
        # on another.
        self.sent_bytes += sent_bytes
        return Delivered()

    def receive(
        self, step: BoxingStep, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """Wait for the pieces of all senders and put them together."""
        self._check_rank(step, self.rank in step.target[0])
        pieces = [piece for piece in transfer_pieces(step) if piece.receiver == self.rank]
        senders = dict.fromkeys(piece.sender for piece in pieces)
        own = [piece for piece in pieces if piece.sender == self.rank]
        if shard is None and own:
            raise BoxingError(
                f"rank {self.rank} keeps a piece of its own shard, but was given no shard",
                where=str(step),
                todo="pass the rank's source shard to receive",
            )
        others = [sender for sender in senders if sender != self.rank]
        call = CollectiveCall.begin(step, tag, self.rank, deadline_s)
        messages = self._backend.collect(call, others)
        received = {piece: part for message in messages.values() for piece, part in message}
        if shard is not None:
            shard = detach_shard(shard)
            received |= {piece: shard[piece.source_slices] for piece in own}
        return combine(
            step,
            self.rank,
            [(piece, received[piece]) for piece in pieces],
            device=None if shard is None else shard.device,
        )

    def _check_rank(self, step: BoxingStep, takes_part: bool) -> None:
        if not takes_part:
            raise BoxingError(f"rank {self.rank} has no part in this step", where=str(step))


class _LocalPending(Pending):
    """A collective that a rank has begun.

    Args:
        communicator: The communicator of the rank.
        call: The call that began it.
        arrival: The rendezvous that has its shard.
    """

    __slots__ = ("_arrival", "_call", "_communicator")

    def __init__(
        self, communicator: LocalCommunicator, call: CollectiveCall, arrival: _Arrival
    ) -> None:
        self._communicator, self._call, self._arrival = communicator, call, arrival

    def wait(self) -> torch.Tensor:
        """See `Pending.wait`."""
        self._call.restart()
        return self._communicator.finish(self._call, self._arrival)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _as_boxing_error(step: BoxingStep, error: BaseException) -> BoxingError:
    """Return the error for all ranks of a step in which one rank failed."""
    if isinstance(error, BoxingError):
        return error
    found = BoxingError(f"a boxing step failed: {type(error).__name__}: {error}", where=str(step))
    found.__cause__ = error
    return found


def _copy_of(error: BoxingError) -> BoxingError:
    """Return a copy of an error for another thread, so that each has its own traceback."""
    copy = error.replaced(BoxingError)
    copy.__cause__ = error.__cause__ or error
    return copy


def build(config: EmptyConfig) -> LocalBackend:
    """Make the backend: kind `boxing`, name `local`."""
    return LocalBackend()
