"""Connect one rank to the other ranks over MPI, keep messages moving, and tell of failures.

Groups of ranks are connected when a step first needs them. One thread keeps messages alive and
moving: MPI moves a large message only while its sender calls MPI, so a sender that computes would
delay the receiver. A failed call breaks all connections of this process
(`sbp_core.processes.connections`). By an entry in the control store, it also breaks the waiting
calls of other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sbp_boxing_nccl.mpi.control_store import MpiControlStore
from sbp_boxing_nccl.mpi.mpi_group import SPIN_S, MpiGroup, MpiWork, pause_after
from sbp_core.boxing import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.processes import CLOSE_TIMEOUT_S, Connections, Outbox, group_name, run_abandonable

#: Seconds that a failed rank waits, when it closes, for MPI to deliver the reason.
_DELIVERY_S = 1.0

#: Seconds that a rank waits, when it closes, for the last entries of the other ranks.
_LAST_ENTRIES_S = 2.0

#: Seconds between two polls of all other work while a rank waits for one message.
_LOOK_AROUND_S = 5e-4

#: Seconds between two checks whether the ranks that are being connected still run.
_LOOK_S = 0.1

#: Polls of a message right after sending; polls of a moving message before the next one's turn.
_EAGER_LOOKS, _LOOKS = 4, 32

#: Seconds that the thread leaves a first message to its sender, which may move it itself.
_FIRST_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiMessage:
    """One message that was sent but may not have been received yet."""

    call: CollectiveCall
    receiver: int
    group: MpiGroup
    work: MpiWork


class MpiOutbox(Outbox[MpiMessage]):
    """The messages that this process has sent.

    Args:
        fail: Called with a `BoxingError` when a message was not received within its deadline.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._fail = fail

    def keep(self, message: MpiMessage) -> None:
        """See `Outbox.keep`."""
        if not message.work.look(_EAGER_LOOKS):
            super().keep(message)

    def wait(self, message: MpiMessage, limit_s: float) -> bool:
        """Wait until a message is received; False if it is not within `limit_s` seconds."""
        if message.work.is_over:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: message.work.is_over, limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """See `Outbox.close`; undelivered messages are abandoned."""
        super().close(limit_s)
        for message in self._messages:
            message.group.abandon(message.work)

    def _watch(self) -> None:
        moved, moved_s = -1, 0.0
        while True:
            waits = not self._messages
            self._await_first()
            if self._closed:
                return
            if waits:
                # If the sender waits for something itself now, it moves its messages meanwhile.
                time.sleep(_FIRST_PAUSE_S)
                moved = -1
            messages = list(self._messages)
            idle_s = time.monotonic() - moved_s if moved >= 0 else 0.0
            try:
                for message in messages:
                    message.work.look(_LOOKS if idle_s < SPIN_S else 1)
            except RuntimeError as error:  # MPI itself has failed
                self._fail(messages[0].call.failed(f"MPI reported: {error}"))
                return
            num_done, now = sum(message.work.num_done for message in messages), time.monotonic()
            if num_done != moved:
                moved, moved_s = num_done, now
            if received := [message for message in messages if message.work.is_over]:
                self._forget(received)
            late = [m for m in messages if not m.work.is_over and m.call.is_over]
            if late:
                self._fail(late[0].call.missing([late[0].receiver]))
                return
            if pause_s := pause_after(now - moved_s):
                time.sleep(pause_s)


class MpiConnections(Connections):
    """The connections of one rank to all other ranks.

    Args:
        comm: Communicator of all ranks; the caller frees it.
        mpi: The module `mpi4py.MPI`.
        limit_s: Seconds to wait for the other ranks.

    Raises:
        BoxingError: the ranks could not be connected.
    """

    transport_errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError, OverflowError)
    transport_says: ClassVar[str] = "MPI reported: "

    def __init__(self, comm: Any, mpi: Any, limit_s: float) -> None:
        # Duplicates of the communicator, one for entries and one for messages, to keep them apart.
        self._control_comm = _duplicate(comm, limit_s)
        store = MpiControlStore(self._control_comm, mpi)
        super().__init__(store)
        #: The same store, with the methods that only `MpiControlStore` has.
        self._mpi_store = store
        self._mpi = mpi
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self._groups: dict[tuple[int, ...], MpiGroup] = {}
        #: Unfinished work that nobody has waited for, with its group, by `id`.
        self.begun: dict[int, tuple[MpiGroup, MpiWork]] = {}
        self._abandoned = False
        everyone = tuple(range(comm.Get_size()))
        #: The group, of all ranks in order, that carries messages.
        self.messages = MpiGroup(everyone, _duplicate(comm, limit_s), mpi)
        self._outbox = MpiOutbox(self.fail)
        self.rendezvous(limit_s)

    @property
    def largest_tag(self) -> int:
        """Largest valid tag."""
        largest: int = self._comm.Get_attr(self._mpi.TAG_UB)
        return largest

    def group(self, call: CollectiveCall, ranks: tuple[int, ...]) -> MpiGroup:
        """Return the group of some ranks; the first call connects it, with the other ranks.

        Raises:
            BoxingError: a rank did not take part in time, or has failed.
        """
        if ranks in self._groups:
            return self._groups[ranks]
        self.wait_for_group(call, group_name(ranks), ranks)
        with self.guard(call):
            group = MpiGroup(ranks, self._create(call, ranks), self._mpi)
        with self._lock:
            self._groups[ranks] = group
        return group

    def post(
        self, call: CollectiveCall, receiver: int, values: torch.Tensor, tag: int
    ) -> MpiMessage:
        """Send a message, and keep it alive until it is received.

        Args:
            call: The call that sends it.
            receiver: The receiving rank.
            tag: Tag of the message.
            values: Shape (elements,), contiguous; not used by anything else.
        """
        with self.guard(call):
            work = self.messages.send(values, receiver, tag)
            message = MpiMessage(call=call, receiver=receiver, group=self.messages, work=work)
            self._outbox.keep(message)
        return message

    def await_message(self, message: MpiMessage) -> None:
        """Wait until a message is received.

        Raises:
            BoxingError: it was not received in time, or a rank has failed.
        """
        call = message.call
        while not self._outbox.wait(message, _LOOK_AROUND_S):
            self.check_peers(call)
            with self.guard(call):
                self.progress()  # other ranks may wait for work started here before they receive
            if call.is_over:
                raise self.call_failed(call, call.missing([message.receiver]))

    def wait(self, call: CollectiveCall, work: MpiWork, limit_s: float) -> bool:
        """Wait for work; False if it is still under way after `limit_s` seconds.

        Raises:
            BoxingError: a rank has failed.
        """
        with self.guard(call):
            return work.wait(limit_s, lambda: self.check_peers(call), self.progress)

    def progress(self) -> None:
        """Let MPI make progress on all unfinished work."""
        for _, work in list(self.begun.values()):
            work.progress()

    def abandon(self, group: MpiGroup, work: MpiWork) -> None:
        """Give up unfinished work."""
        self._abandoned = True
        group.abandon(work)

    def _announce(self, text: str) -> None:
        """See `Connections._announce`; a waiting rank reads it at its next check."""
        self.control_store.announce_failure(text)

    def _release(self) -> None:
        """See `Connections._release`; waits a while for messages, and for late ranks."""
        if self._failure is None and not self._outbox.flush(CLOSE_TIMEOUT_S):
            self._abandoned = True
        self._outbox.close()
        for group, work in self.begun.values():
            if not work.is_over:
                self.abandon(group, work)
        self.begun.clear()
        store = self._mpi_store
        store.deregister()
        if self._failure is None:
            is_well = self._await_others()
        else:
            store.wait_for(store.all_delivered, _DELIVERY_S)
            is_well = False
        store.end()
        if is_well and not self._abandoned and store.wait_for(store.all_ended, _LAST_ENTRIES_S):
            # Freeing is collective: all ranks have arrived here, and free in one order.
            for ranks in sorted(self._groups):
                self._groups[ranks].free()
            self.messages.free()
            store.close()
            self._control_comm.Free()

    def _create(self, call: CollectiveCall, ranks: tuple[int, ...]) -> Any:
        """Create the communicator of some ranks, all of which call this.

        Raises:
            BoxingError: it was not created in time, or a rank has failed.
        """

        def create() -> Any:
            members = self._comm.Get_group()
            chosen = members.Incl(list(ranks))
            comm = self._comm.Create_group(chosen)
            chosen.Free()
            members.Free()
            return comm

        try:
            # Create_group has no deadline: one of the ranks may stop just now.
            return run_abandonable(
                create,
                thread_name="sbp-connect",
                check=lambda: self.check_peers(call),
                look_s=_LOOK_S,
                limit_s=call.left_s,
            )
        except TimeoutError:
            self._abandoned = True
            slow = f"MPI did not connect ranks {list(ranks)} in time, although all had started"
            raise self.call_failed(call, call.failed(slow, involved=ranks)) from None


def _duplicate(comm: Any, limit_s: float) -> Any:
    """Return a duplicate of a communicator of all ranks, with a separate context.

    Raises:
        BoxingError: a rank did not take part in time.
    """
    duplicate, request = comm.Idup()
    if not MpiWork(request=request, tensors=()).wait(limit_s, lambda: None):
        raise BoxingError(
            f"the ranks of MPI were not connected within {limit_s:g} s",
            where=f"rank {comm.Get_rank()} of {comm.Get_size()}",
            todo="check that every process opens the boxing backend",
        )
    return duplicate
