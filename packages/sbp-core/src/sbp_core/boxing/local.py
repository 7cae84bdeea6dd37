"""The `local` backend: ranks are threads of one process, tensors are handed over by reference.

A collective is a rendezvous: each rank leaves its shard, the last to arrive runs the step for all
of them (`execute.apply_step`) and wakes the others. A transfer goes through a mailbox, in order of
sending. Nothing is copied that can be shared, and sums are made once, in mesh order. Knows torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sbp_core.boxing.backend import BoxingBackend, Communicator
from sbp_core.boxing.execute import apply_step, check_shard, combine
from sbp_core.boxing.slices import Piece, sent_bytes, transfer_pieces
from sbp_core.boxing.step import Step, StepKind, missing_ranks
from sbp_core.errors import BoxingError

if TYPE_CHECKING:
    from sbp_core.plugins.hooks import EmptyConfig

#: Where ranks meet: the tag, and the ranks that meet.
_Key = tuple[str, tuple[int, ...]]

#: One letter: the pieces that one rank sends another in one transfer.
_Letter = list[tuple[Piece, torch.Tensor]]


class _Rendezvous:
    """One collective of one group, from the first arrival until the last rank has left."""

    def __init__(self, step: Step, lock: threading.Lock) -> None:
        self.step = step
        self.changed = threading.Condition(lock)
        self.shards: dict[int, torch.Tensor] = {}
        self.results: dict[int, torch.Tensor] | None = None
        self.error: BoxingError | None = None
        self.unheard: set[int] = set()

    @property
    def over(self) -> bool:
        return self.results is not None or self.error is not None


class LocalBackend(BoxingBackend):
    """Boxing among the threads of one process."""

    spans_processes = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: tuple[int, ...] = ()
        self._communicators: dict[int, LocalCommunicator] = {}
        self._rendezvous: dict[_Key, _Rendezvous] = {}
        self._mail: dict[tuple[str, int, int], deque[_Letter]] = {}
        self._mail_came: dict[int, threading.Condition] = {}
        self._failure: BoxingError | None = None

    def open(self, ranks: Sequence[int]) -> None:
        """Make a communicator for each of `ranks`, all of which live in this process.

        Raises:
            BoxingError: the backend is open already or was closed, or a rank repeats.
        """
        with self._lock:
            self._check_open()
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
        """Return all ranks: they all live here."""
        return self._ranks

    def communicator(self, rank: int) -> LocalCommunicator:
        """Return the communicator of a rank; the same on every call.

        Raises:
            BoxingError: the rank is not among those that were opened.
        """
        if rank not in self._communicators:
            raise BoxingError(
                f"rank {rank} is not on this backend",
                accepted=", ".join(map(str, self._ranks)) or "none: the backend is not open",
            )
        return self._communicators[rank]

    def fail(self, error: BaseException) -> None:
        """Unblock every waiting call with a `BoxingError` caused by `error`."""
        failure = BoxingError(
            f"boxing stopped because another part of the run failed: {error}",
            todo="mend that failure; this rank only waited",
        )
        failure.__cause__ = error
        self._stop(failure)

    def close(self) -> None:
        """Drop everything that waits; further calls raise `BoxingError`."""
        self._stop(BoxingError("the local boxing backend is closed"))
        with self._lock:
            self._mail.clear()

    def _stop(self, failure: BoxingError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            for rendezvous in self._rendezvous.values():
                rendezvous.error = rendezvous.error or self._failure
                rendezvous.changed.notify_all()
            self._rendezvous.clear()
            for came in self._mail_came.values():
                came.notify_all()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise _again(self._failure)

    def meet(
        self, step: Step, rank: int, shard: torch.Tensor, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """Take part in a collective; see `Communicator.collective`."""
        group = step.group(rank)
        key = (tag, group)
        with self._lock:
            self._check_open()
            rendezvous = self._rendezvous.get(key)
            if rendezvous is None:
                rendezvous = self._rendezvous[key] = _Rendezvous(step, self._lock)
            if rendezvous.error is None and rendezvous.step != step:
                error = BoxingError(
                    f"ranks meet under tag {tag!r} for different steps",
                    where=(f"rank {rank}: {step}", f"others: {rendezvous.step}"),
                    accepted="one step for each tag and group",
                )
                self._fail_rendezvous(key, rendezvous, error)
            if rendezvous.error is not None:
                raise self._hear(key, rendezvous, rank)
            rendezvous.shards[rank] = shard
            last = len(rendezvous.shards) == len(group)
            if last:
                # The tag is free for its next use; those who wait hold the object itself.
                del self._rendezvous[key]
            else:
                self._await(key, rendezvous, rank, tag, deadline_s)
        if last:
            self._complete(rendezvous)
        if rendezvous.error is not None:
            raise _again(rendezvous.error)
        assert rendezvous.results is not None, "a rendezvous ends with results or an error"
        return rendezvous.results[rank]

    def _await(
        self, key: _Key, rendezvous: _Rendezvous, rank: int, tag: str, deadline_s: float
    ) -> None:
        """Wait, holding the lock, until the rendezvous is over; fail it at the deadline."""
        full = len(key[1])
        end = time.monotonic() + deadline_s
        while not rendezvous.over:
            left_s = end - time.monotonic()
            if len(rendezvous.shards) == full:
                # All have come: the last one is computing, which is no one's absence.
                rendezvous.changed.wait()
            elif left_s <= 0 or not rendezvous.changed.wait(left_s):
                if rendezvous.over or len(rendezvous.shards) == full:
                    continue
                missing = [other for other in key[1] if other not in rendezvous.shards]
                error = missing_ranks(rendezvous.step, tag, missing, deadline_s, rank=rank)
                self._fail_rendezvous(key, rendezvous, error)

    def _fail_rendezvous(self, key: _Key, rendezvous: _Rendezvous, error: BoxingError) -> None:
        """End a rendezvous for those who came; it stays until the others have heard of it."""
        rendezvous.error = error
        rendezvous.unheard = set(key[1]) - rendezvous.shards.keys()
        rendezvous.shards.clear()
        rendezvous.changed.notify_all()

    def _hear(self, key: _Key, rendezvous: _Rendezvous, rank: int) -> BoxingError:
        """Return the error of a rendezvous that failed before this rank came."""
        assert rendezvous.error is not None, "only a failed rendezvous is heard of"
        rendezvous.unheard.discard(rank)
        if not rendezvous.unheard:
            self._rendezvous.pop(key, None)
        return _again(rendezvous.error)

    def _complete(self, rendezvous: _Rendezvous) -> None:
        """Run the step for all ranks and wake them. Called without the lock."""
        results, error = None, None
        try:
            results = apply_step(rendezvous.step, rendezvous.shards)
        except BoxingError as caught:
            error = caught
        except BaseException as caught:  # whatever it was, the others must not wait for ever
            error = BoxingError(
                f"a boxing step failed: {type(caught).__name__}: {caught}",
                where=str(rendezvous.step),
            )
            error.__cause__ = caught
        with self._lock:
            rendezvous.results, rendezvous.error = results, error
            rendezvous.shards = {}
            rendezvous.changed.notify_all()

    def post(self, tag: str, sender: int, letters: dict[int, _Letter]) -> None:
        """Put letters into the mailboxes of their receivers."""
        with self._lock:
            self._check_open()
            for receiver, letter in letters.items():
                if receiver not in self._mail_came:
                    raise BoxingError(
                        f"rank {sender} sends to rank {receiver}, which is not on this backend",
                        accepted=", ".join(map(str, self._ranks)),
                    )
                self._mail.setdefault((tag, sender, receiver), deque()).append(letter)
                self._mail_came[receiver].notify_all()

    def collect(
        self, step: Step, tag: str, receiver: int, senders: Sequence[int], deadline_s: float
    ) -> dict[int, _Letter]:
        """Wait for one letter of each sender and take them out of the mailbox."""
        keys = {sender: (tag, sender, receiver) for sender in senders}

        def come() -> bool:
            return self._failure is not None or all(key in self._mail for key in keys.values())

        with self._lock:
            in_time = self._mail_came[receiver].wait_for(come, deadline_s)
            self._check_open()
            if not in_time:
                missing = [sender for sender, key in keys.items() if key not in self._mail]
                raise missing_ranks(step, tag, missing, deadline_s, rank=receiver)
            letters: dict[int, _Letter] = {}
            for sender, key in keys.items():
                letters[sender] = self._mail[key].popleft()
                if not self._mail[key]:
                    del self._mail[key]
            return letters


class LocalCommunicator(Communicator):
    """The ends of all steps of one rank that is a thread of this process."""

    def __init__(self, backend: LocalBackend, rank: int) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._backend = backend

    def collective(
        self,
        step: Step,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> torch.Tensor:
        """Meet the step's group; the last to arrive computes for all."""
        if step.kind in (StepKind.TRANSFER, StepKind.LOCAL):
            raise BoxingError(f"a {step.kind.value} step is no collective", where=str(step))
        self._check_rank(step, self.rank in step.source[0])
        result = self._backend.meet(step, self.rank, shard, tag, deadline_s)
        self.sent_bytes += sent_bytes(step, self.rank)
        return result

    def send(self, step: Step, shard: torch.Tensor, *, tag: str, deadline_s: float) -> None:
        """Put this rank's pieces into the mailboxes of the receivers; never waits."""
        self._check_rank(step, self.rank in step.source[0])
        check_shard(step, self.rank, shard)
        letters: dict[int, _Letter] = {}
        for piece in transfer_pieces(step):
            if piece.sender == self.rank != piece.receiver:
                part = (piece, shard[piece.source_slices])
                letters.setdefault(piece.receiver, []).append(part)
        self._backend.post(tag, self.rank, letters)
        self.sent_bytes += sent_bytes(step, self.rank)

    def receive(
        self, step: Step, shard: torch.Tensor | None, *, tag: str, deadline_s: float
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
        letters = self._backend.collect(step, tag, self.rank, others, deadline_s)
        received = {piece: part for letter in letters.values() for piece, part in letter}
        if shard is not None:
            received |= {piece: shard[piece.source_slices] for piece in own}
        return combine(
            step,
            self.rank,
            [(piece, received[piece]) for piece in pieces],
            device=None if shard is None else shard.device,
        )

    def _check_rank(self, step: Step, takes_part: bool) -> None:
        if not takes_part:
            raise BoxingError(f"rank {self.rank} has no part in this step", where=str(step))


def _again(error: BoxingError) -> BoxingError:
    """Return a copy of an error to raise on one more thread, each with its own traceback."""
    copy = BoxingError(error.what, where=error.where, accepted=error.accepted, todo=error.todo)
    copy.__cause__ = error.__cause__ or error
    return copy


def build(config: EmptyConfig) -> LocalBackend:
    """Make the backend: kind `boxing`, name `local`."""
    return LocalBackend()
