"""The connections of one process: groups of ranks, messages on their way, and how it all breaks.

Groups of ranks are connected when a step first needs them. A call that fails breaks everything
here (`sbp_core.boxing.processes.connections`), and by a note on the board whatever waits on other
ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from sbp_boxing_nccl.board import MpiBoard
from sbp_boxing_nccl.group import MpiGroup, MpiWork
from sbp_boxing_nccl.outbox import Message, Outbox
from sbp_core.boxing.processes import CollectiveCall, Connections, group_name
from sbp_core.errors import BoxingError

_log = logging.getLogger(__name__)

#: Seconds that a rank waits, when it closes, for the others not to need it any more.
_FAREWELL_S = 10.0

#: Seconds that a rank which failed waits, when it closes, for the others to hear why.
_NEWS_S = 1.0

#: Seconds that it waits for their last notes.
_LAST_NOTES_S = 2.0

#: Seconds between two looks whether the ranks that are being connected still run.
_LOOK_S = 0.1


class MpiConnections(Connections):
    """The connections of one rank to all others.

    Args:
        comm: Communicator of all ranks; its owner keeps it.
        mpi: The module `mpi4py.MPI`.
        limit_s: Seconds to wait for the other ranks.

    Raises:
        BoxingError: the ranks could not be connected.
    """

    def __init__(self, comm: Any, mpi: Any, limit_s: float) -> None:
        super().__init__()
        self._mpi = mpi
        self._comm = comm
        everyone = tuple(range(comm.Get_size()))
        self.rank: int = comm.Get_rank()
        self._groups: dict[tuple[int, ...], MpiGroup] = {}
        self._abandoned = False
        self._private = self._duplicate(limit_s)
        self.board = MpiBoard(self._private, mpi)
        self._messages = MpiGroup(everyone, self._duplicate(limit_s), mpi)
        self._outbox = Outbox(self.fail)
        self.watch_over(self.board, limit_s)

    @property
    def largest_tag(self) -> int:
        """The largest number that may be a tag."""
        largest: int = self._comm.Get_attr(self._mpi.TAG_UB)
        return largest

    def group(self, call: CollectiveCall, ranks: tuple[int, ...]) -> MpiGroup:
        """Return the group of some ranks; the first call connects it, together with the others.

        Raises:
            BoxingError: a rank did not come in time, or has failed.
        """
        if ranks in self._groups:
            return self._groups[ranks]
        board, name = self.board, group_name(ranks)
        board.join(name, ranks)

        def over() -> bool:
            self.check_others(call)
            return not board.not_joined(name, ranks)

        # Create_group has no deadline, so that it is called once all ranks are there for it.
        if not board.wait_for(over, call.left_s):
            raise self.broken(call, call.missing(board.not_joined(name, ranks)))
        with self.guard(call):
            group = MpiGroup(ranks, self._create(call, ranks), self._mpi)
        with self._lock:
            self._groups[ranks] = group
        return group

    def messages(self) -> MpiGroup:
        """Return the group, of all ranks in order, that carries messages."""
        return self._messages

    def post(self, call: CollectiveCall, receiver: int, values: torch.Tensor, tag: int) -> None:
        """Send a message, and keep it alive until it is received.

        Args:
            call: The call that sends it.
            receiver: Rank that it goes to.
            tag: Its number.
            values: Shape (elements,), contiguous; not used by anybody else.
        """
        with self.guard(call):
            work = self._messages.send(values, receiver, tag)
            message = Message(call=call, receiver=receiver, group=self._messages, work=work)
            self._outbox.keep(message)

    def wait(self, call: CollectiveCall, group: MpiGroup, work: MpiWork, limit_s: float) -> bool:
        """Wait for work; False if it is still under way after `limit_s` seconds.

        Raises:
            BoxingError: a rank has failed; the work is abandoned.
        """
        try:
            with self.guard(call):
                return work.wait(limit_s, lambda: self.check_others(call))
        except BoxingError:
            self.abandon(group, work)
            raise

    def abandon(self, group: MpiGroup, work: MpiWork) -> None:
        """Give up work that is under way."""
        self._abandoned = True
        group.abandon(work)

    @contextlib.contextmanager
    def guard(self, call: CollectiveCall) -> Iterator[None]:
        """Turn the errors of MPI into one that says which step failed, and why."""
        try:
            yield
        except BoxingError:
            raise
        except (RuntimeError, OverflowError) as error:
            raise self.lost(call, f"MPI reported: {error}") from error

    def _announce(self, text: str) -> None:
        """See `Connections._announce`; who waits sees the note when it looks next."""
        self.board.announce(text)

    def _release(self) -> None:
        """See `Connections._release`; waits a while for messages, and for ranks on their way."""
        if self._failure is None and not self._outbox.flush(_FAREWELL_S):
            self._abandoned = True
        self._outbox.close()
        board = self.board
        board.leave()
        is_well = self._part()
        board.end()
        if is_well and not self._abandoned and board.wait_for(board.all_ended, _LAST_NOTES_S):
            # Freeing is collective: all ranks have left, and free in one order.
            for ranks in sorted(self._groups):
                self._groups[ranks].free()
            self._messages.free()
            board.close()
            self._private.Free()

    def _part(self) -> bool:
        """Stay until no rank needs this one; say whether all of them are well."""
        board = self.board

        def over() -> bool:
            return board.all_left() or self.reason_to_go() is not None

        if self._failure is not None:
            board.wait_for(board.all_heard, _NEWS_S)
            return False
        if not board.wait_for(over, _FAREWELL_S):
            _log.warning("rank %d leaves before other ranks did", self.rank)
            return False
        return board.failure() is None

    def _create(self, call: CollectiveCall, ranks: tuple[int, ...]) -> Any:
        """Return the communicator of some ranks, all of which are there to make it.

        MPI makes it on another thread, which is left behind if one of them stops just then.

        Raises:
            BoxingError: it was not made in time, or a rank has failed.
        """
        made: Future[Any] = Future()

        def run() -> None:
            try:
                members = self._comm.Get_group()
                chosen = members.Incl(list(ranks))
                made.set_result(self._comm.Create_group(chosen))
                chosen.Free()
                members.Free()
            except Exception as error:
                if not made.done():
                    made.set_exception(error)

        threading.Thread(target=run, name="sbp-connect", daemon=True).start()
        while not call.is_over:
            try:
                return made.result(min(_LOOK_S, call.left_s))
            except TimeoutError:
                self.check_others(call)
        self._abandoned = True
        slow = f"MPI did not connect ranks {list(ranks)}, all of which had come, in time"
        raise self.broken(call, call.failed(slow, involved=ranks))

    def _duplicate(self, limit_s: float) -> Any:
        """Return a communicator of all ranks with a context of its own."""
        comm, request = self._comm.Idup()
        if not MpiWork(request=request, tensors=()).wait(limit_s, lambda: None):
            raise BoxingError(
                f"the ranks of MPI were not connected within {limit_s:g} s",
                where=f"rank {self.rank} of {self._comm.Get_size()}",
                todo="check that every process opens the boxing backend",
            )
        return comm
