"""A debug mode of every boxing backend: ranks compare each boxing step before its data moves.

    rank 0   collective(all-reduce, float32[4, 2])            gather fingerprints -> differ: raise
    rank 1   collective(all-gather, float32[8])               gather fingerprints -> differ: raise

    rank 0   send(to 1, tag "x")   fingerprint 0, then data
    rank 1   receive(from 0, "x")  fingerprint 0: does it match "x"? then data

Without it, two ranks that run different programs wait for each other until a deadline, use wrong
data, or are aborted by the transport. It costs one small exchange per boxing step.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from sbp_core.boxing import (
    BoxingBackend,
    BoxingStep,
    CollectiveCall,
    Communicator,
    Delivery,
    LaunchSpec,
    StepKind,
    SurvivingRanks,
    sent_bytes,
    transfer_pieces,
)
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_torch.boxing.processes.agreement import gather_texts, tensor_text, text_tensor

#: Bytes of a fingerprint: 16 hex digits of a digest, then a readable text.
_WIDTH_BYTES = 512
_DIGEST_CHARACTERS = 16

_TODO = (
    "the ranks run different programs, or the same one with different configs: compare what they "
    "do just before this step"
)


class Fingerprinted(BoxingBackend):
    """A backend that compares every step between the ranks before its data moves.

    Args:
        backend: The backend that moves data, not yet open.
    """

    def __init__(self, backend: BoxingBackend) -> None:
        self._backend = backend
        self._communicators: dict[int, FingerprintedCommunicator] = {}
        self.spans_processes = backend.spans_processes

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """See `BoxingBackend.launch_specs`."""
        return self._backend.launch_specs(num_ranks, command)

    def open(self, ranks: Sequence[int]) -> None:
        """See `BoxingBackend.open`."""
        self._backend.open(ranks)
        self._communicators = {
            rank: FingerprintedCommunicator(self._backend, self._backend.communicator(rank))
            for rank in self._backend.local_ranks()
        }

    def local_ranks(self) -> tuple[int, ...]:
        """See `BoxingBackend.local_ranks`."""
        return self._backend.local_ranks()

    def communicator(self, rank: int) -> Communicator:
        """See `BoxingBackend.communicator`."""
        if rank not in self._communicators:
            return self._backend.communicator(rank)  # its error says why there is none
        return self._communicators[rank]

    def fail(self, error: BaseException) -> None:
        """See `BoxingBackend.fail`."""
        self._backend.fail(error)

    def failure_reason(self) -> str:
        """See `BoxingBackend.failure_reason`."""
        return self._backend.failure_reason()

    def survivors(self, limit_s: float) -> SurvivingRanks:
        """See `BoxingBackend.survivors`."""
        return self._backend.survivors(limit_s)

    def close(self) -> None:
        """See `BoxingBackend.close`."""
        self._backend.close()


@dataclass(slots=True)
class _ReceivedFingerprints:
    """The fingerprints that one rank has sent to another.

    Args:
        changed: The condition whose lock protects the other attributes.
        unclaimed: Received fingerprints whose messages were not yet received, by digest of the tag.
        count: Number of received fingerprints.
        is_read: Whether a thread is receiving the next one.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    unclaimed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    count: int = 0
    is_read: bool = False


class FingerprintedCommunicator(Communicator):
    """Executes boxing steps for one rank, after comparing each step with other ranks.

    `sent_bytes` counts the bytes that this rank sends in steps, without fingerprints; the inner
    communicator counts all bytes that are moved.

    Args:
        backend: The backend, which fails when two ranks differ.
        communicator: The inner communicator, which moves data and fingerprints.
    """

    def __init__(self, backend: BoxingBackend, communicator: Communicator) -> None:
        self.rank, self.device = communicator.rank, communicator.device
        self.sent_bytes = 0
        self._backend = backend
        self._communicator = communicator
        self._lock = threading.Lock()
        #: The number of collectives by group, and of messages by receiver.
        self._counts: dict[tuple[int, ...] | int, int] = defaultdict(int)
        self._received_from: dict[int, _ReceivedFingerprints] = {}

    def collective(
        self,
        step: BoxingStep,
        shard: torch.Tensor,
        *,
        tag: str,
        deadline_s: float,
        donate: bool = False,
    ) -> torch.Tensor:
        """Compare the step with the steps of all ranks in the group; then run it."""
        call = CollectiveCall.begin(step, tag, self.rank, deadline_s)
        ranks = step.group(self.rank)
        if step.kind in (StepKind.TRANSFER, StepKind.LOCAL):
            raise BoxingError(f"a {step.kind.value} step is no collective", where=str(step))
        # The count distinguishes equal steps: otherwise a rank that skips one would be noticed
        # late, or never.
        count = self._count(ranks)
        mine = _fingerprint(step, tag, f"call {count} of the group")
        texts = gather_texts(
            self._communicator,
            ranks,
            mine,
            tag=f"fingerprint of call {count} among ranks {', '.join(map(str, ranks))}",
            width_bytes=_WIDTH_BYTES,
            deadline_s=deadline_s,
        )
        other = next((rank for rank, text in texts.items() if text != texts[self.rank]), None)
        if other is not None:
            # Every rank of the group sees all texts, so every rank raises, and none waits.
            raise self._mismatch({rank: _readable(text) for rank, text in texts.items()})
        result: torch.Tensor = self._communicator.collective(
            step, shard, tag=tag, deadline_s=round(call.left_s, 3), donate=donate
        )
        self._note_sent(step)
        return result

    def send(
        self, step: BoxingStep, shard: torch.Tensor, *, tag: str, deadline_s: float
    ) -> Delivery:
        """Send each receiver a fingerprint, and then its message, without waiting."""
        text = _fingerprint(step, tag, "")
        values = text_tensor(text, _WIDTH_BYTES, shard.device)
        # First the fingerprint, then the message: sending does not wait, so a receiver that is in
        # another step learns of this before it takes the data.
        for receiver in _others(step, sender=self.rank):
            number = self._count(receiver)
            self._communicator.send(
                _fingerprint_step(self.rank, receiver),
                values,
                tag=_fingerprint_tag(self.rank, receiver, number),
                deadline_s=deadline_s,
            )
        delivery = self._communicator.send(step, shard, tag=tag, deadline_s=deadline_s)
        self._note_sent(step)
        return delivery

    def receive(
        self, step: BoxingStep, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """Compare the step with the fingerprints of all senders; then receive the messages."""
        call = CollectiveCall.begin(step, tag, self.rank, deadline_s)
        mine = _fingerprint(step, tag, "")
        for sender in _others(step, receiver=self.rank):
            theirs = self._await(sender, tag, mine, call)
            if theirs != mine:
                raise self._mismatch({sender: _readable(theirs), self.rank: _readable(mine)})
        received: torch.Tensor = self._communicator.receive(
            step, shard, tag=tag, deadline_s=round(call.left_s, 3)
        )
        return received

    def _await(self, sender: int, tag: str, mine: str, call: CollectiveCall) -> str:
        """Return the fingerprint that a sender has sent for a tag.

        Messages may be received in another order than they were sent: fingerprints of other tags
        are kept. One thread at a time receives, for all threads.
        """
        with self._lock:
            log = self._received_from.setdefault(sender, _ReceivedFingerprints())
        key = _key(tag)
        while True:
            with log.changed:
                log.changed.wait_for(lambda: key in log.unclaimed or not log.is_read)
                if key in log.unclaimed:
                    found = log.unclaimed[key].pop(0)
                    if not log.unclaimed[key]:
                        del log.unclaimed[key]
                    return found
                # Fingerprints of one sender are numbered, and the number is in the tag. Only one
                # thread may take the next one, which may be for another thread. The other threads
                # wait for it. The thread does not hold the lock while it receives.
                number, log.is_read = log.count, True
            try:
                text = self._receive_fingerprint(sender, number, log, mine, call)
                with log.changed:
                    log.count += 1
                    log.unclaimed[_key_of(text)].append(text)
            finally:
                with log.changed:
                    log.is_read = False
                    log.changed.notify_all()

    def _receive_fingerprint(
        self,
        sender: int,
        number: int,
        log: _ReceivedFingerprints,
        mine: str,
        call: CollectiveCall,
    ) -> str:
        try:
            values = self._communicator.receive(
                _fingerprint_step(sender, self.rank),
                None,
                tag=_fingerprint_tag(sender, self.rank, number),
                deadline_s=round(call.left_s, 3),
            )
        except BoxingError as error:
            with log.changed:
                kept = [_readable(text) for texts in log.unclaimed.values() for text in texts]
            sent = "; ".join(kept) or "nothing else"
            raise BoxingError(
                error.what,
                where=(
                    *error.where,
                    f"rank {self.rank} awaits: {_readable(mine)}",
                    f"rank {sender} has sent, and no rank has received: {sent}",
                ),
                todo=error.todo,
            ) from error
        return tensor_text(values)

    def _mismatch(self, shown: dict[int, str]) -> BoxingError:
        """Fail the backend because the next steps of ranks differ; return the error."""
        error = BoxingError(
            f"ranks {', '.join(map(str, shown))} are at different boxing steps",
            where=[f"rank {rank}: {text}" for rank, text in shown.items()],
            accepted="the same tag, step, shape and dtype on all ranks of a group",
            todo=_TODO,
        )
        self._backend.fail(error)
        return error

    def _count(self, key: tuple[int, ...] | int) -> int:
        """Return the number of earlier collectives of a group, or messages to a receiver."""
        with self._lock:
            self._counts[key] += 1
            return self._counts[key] - 1

    def _note_sent(self, step: BoxingStep) -> None:
        with self._lock:
            self.sent_bytes += sent_bytes(step, self.rank)


def _fingerprint(step: BoxingStep, tag: str, count: str) -> str:
    """Return a text that is equal on two ranks if they are in the same step."""
    (before, source), (after, target) = step.source, step.target
    whole = (
        f"{step.kind} {list(step.shape)} {step.dtype} {before.ranks} {source} {after.ranks} "
        f"{target} {step.axes} {tag!r} {count}"
    )
    shown = f"{tag!r}, {step} of {step.dtype}{list(step.shape)}" + (f", {count}" if count else "")
    digest = blake2b(whole.encode(), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()
    text = f"{digest}{_key(tag)}{shown}"
    # Cutting to the width loses only readable text, because both digests come first.
    return text.encode()[:_WIDTH_BYTES].decode("utf-8", "ignore")


def _readable(fingerprint: str) -> str:
    """Return the readable part of a fingerprint."""
    return fingerprint[2 * _DIGEST_CHARACTERS :]


def _key_of(fingerprint: str) -> str:
    """Return the key of the tag of a fingerprint."""
    return fingerprint[_DIGEST_CHARACTERS : 2 * _DIGEST_CHARACTERS]


def _key(tag: str) -> str:
    return blake2b(tag.encode(), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()


def _others(
    step: BoxingStep, *, sender: int | None = None, receiver: int | None = None
) -> list[int]:
    """Return the receivers of a sender, or the senders to a receiver, in ascending order."""
    if sender is not None:
        found = {piece.receiver for piece in transfer_pieces(step) if piece.sender == sender}
        return sorted(found - {sender})
    found = {piece.sender for piece in transfer_pieces(step) if piece.receiver == receiver}
    return sorted(found - {receiver})


def _fingerprint_step(sender: int, receiver: int) -> BoxingStep:
    """Return the step that sends one fingerprint from one rank to another."""
    return BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(_WIDTH_BYTES,),
        dtype="uint8",
        source=(Placement([sender], ("rank",)), NdSbp(B)),
        target=(Placement([receiver], ("rank",)), NdSbp(B)),
        axes=(),
        size_bytes=_WIDTH_BYTES,
    )


def _fingerprint_tag(sender: int, receiver: int, number: int) -> str:
    return f"fingerprint of message {number} from rank {sender} to rank {receiver}"
