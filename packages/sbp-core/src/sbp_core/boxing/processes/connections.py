"""What holds the processes of a run together, and how it breaks: once, and for all calls.

Which connections there are, and how notes reach another process, is the transport's; who looks for
failures is `watch`. Moves nothing and imports no torch.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from sbp_core.boxing.processes.call import CollectiveCall
from sbp_core.boxing.processes.control_store import ControlStore
from sbp_core.boxing.processes.failure_detector import (
    INTERVAL_S,
    Calls,
    FailureDetector,
    PendingCall,
)
from sbp_core.boxing.processes.membership import Member, MemberState, state_of
from sbp_core.errors import BoxingError, words_of

#: Seconds in which it is found out why a connection broke: who ended, or what was told.
_REASON_S = 1.0

#: Seconds that a rank which failed waits, when it closes, for the others to hear why.
_NEWS_S = 1.0


class Connections(ABC):
    """The connections of one process to all others; the first failure ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self._calls = Calls()
        self._notes: ControlStore | None = None
        self._watch: FailureDetector | None = None

    def watch_over(self, board: ControlStore, limit_s: float) -> None:
        """Meet the other ranks on the board, and watch them from now on.

        Args:
            board: Of this rank.
            limit_s: Seconds to wait for the others.

        Raises:
            BoxingError: a rank did not come, or ended.
        """
        board.register(Member.of_this_process(board.rank))

        looked = time.monotonic()

        def over() -> bool:
            nonlocal looked
            if board.all_enlisted() or board.failure() is not None:
                return True
            if time.monotonic() < looked + INTERVAL_S:
                return False
            looked = time.monotonic()
            return bool(self._gone(board))

        came = board.wait_for(over, limit_s)
        members = board.members()
        missing = [rank for rank in range(board.size) if rank not in members]
        if missing:
            gone = [f"{member.rank} (pid {member.pid})" for member in self._gone(board)]
            why = board.failure() or (f"ended before: ranks {', '.join(gone)}" if gone else "")
            error = BoxingError(
                f"rank {board.rank} waited {'' if came else f'{limit_s:g} s '}for ranks that did "
                f"not open their boxing backend: {', '.join(map(str, missing))}",
                where=why,
                todo="check that every process was started, and see why those did not come",
            )
            board.announce(f"rank {board.rank} reported: {words_of(error)}")
            board.close()
            raise error
        self._notes = board
        if board.size > 1:
            self._watch = FailureDetector(board, members, self._calls, self._learn)
            self._watch.start()

    # Calls.

    def under_way(self, call: CollectiveCall) -> PendingCall:
        """Let others know, while a call takes long, that this rank is in it: a context."""
        return PendingCall(self._calls, call)

    def witness(self, ranks: Collection[int]) -> Sequence[str]:
        """Say what is known about ranks that did not arrive, one a line."""
        return () if self._watch is None else self._watch.witness(ranks)

    def check_usable(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if the connections were closed or have failed."""
        if self._closed:
            raise call.failed("the boxing backend was closed", todo="open a new one")
        if self._failure is not None:
            raise call.failed(words_of(self._failure)) from self._failure

    def check_others(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if waiting for others has become hopeless, as far as they told."""
        self.check_usable(call)
        reason = None if self._notes is None else self._notes.failure()
        if reason is not None:
            raise self.lost(call, reason)

    def broken(self, call: CollectiveCall, error: BoxingError) -> BoxingError:
        """Break everything because a call failed; return the error to raise."""
        if self._failure is not None:
            return call.failed(words_of(self._failure))
        self.fail(error)
        return error

    def lost(self, call: CollectiveCall, report: str) -> BoxingError:
        """Break everything because a connection broke; find out why, and return the error to raise.

        Args:
            call: The call that noticed.
            report: What the transport says; names no rank, as a rule.
        """
        if self._failure is None:
            reason = None if self._watch is None else self._watch.find(_REASON_S)
            self._learn(reason or f"a rank has ended, or its connection is lost ({report})")
        return call.failed(report if self._failure is None else words_of(self._failure))

    # The end.

    @property
    def is_well(self) -> bool:
        """Whether nothing has failed, here or on ranks that told."""
        notes = self._notes
        return self._failure is None and notes is not None and notes.failure() is None

    def fail(self, error: BaseException) -> None:
        """Make every call fail, here and on the ranks that wait for this one."""
        words = words_of(error)
        told = words if self._notes is None else f"rank {self._notes.rank} reported: {words}"
        self._break(error, told)

    def close(self) -> None:
        """Release everything; waits a while for messages and ranks that are on their way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._failure is not None:
            self._linger()
        self._release()
        if self._watch is not None:
            self._watch.stop()
        if self._notes is not None:
            self._notes.close()
        if self._failure is not None:
            # An error keeps the frames that it passed, and these keep groups and messages: whoever
            # caught it may hold on to them, a closed backend does not.
            self._failure = BoxingError(words_of(self._failure))

    def end_with_program(self, error: BaseException) -> None:
        """Tell the others that this process ends without closing its connections."""
        self.fail(error)
        self.close()
        gc.freeze()  # as `_break` asks for, which is too late to do so at the program's end

    def reason_to_go(self) -> str | None:
        """Return why waiting for others makes no sense any more, or None if it does."""
        return None if self._watch is None else self._watch.reason()

    def _learn(self, reason: str) -> None:
        """Break everything for a reason that is not this rank's."""
        self._break(BoxingError(reason), reason)

    def _break(self, error: BaseException, told: str) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        # A program that ends frees all its objects, for which it first looks at each: with those of
        # torch most of a second, in which the other ranks, and the supervisor, see it run.
        atexit.register(gc.freeze)
        if self._notes is not None:
            self._notes.hear()
        self._announce(told)

    def _linger(self) -> None:
        """Wait a moment for the others to hear why this rank goes: they may need it for that."""
        board = self._notes
        if board is None:
            return
        members = board.members()
        deaf = (MemberState.ENDED, MemberState.STOPPED)
        others = [
            rank
            for rank, member in members.items()
            if state_of(member, members[board.rank]) not in deaf
        ]
        board.wait_for(lambda: board.is_lost() or not board.not_heard(others), _NEWS_S)

    def _gone(self, board: ControlStore) -> list[Member]:
        """Return the processes that enlisted and have ended, among those that can be seen."""
        members = board.members()
        me = members.get(board.rank)
        return [
            member
            for member in members.values()
            if me is not None and state_of(member, me) is MemberState.ENDED
        ]

    @abstractmethod
    def _announce(self, text: str) -> None:
        """Tell the other ranks why the run failed, and unblock what waits; called once."""

    @abstractmethod
    def _release(self) -> None:
        """Leave the other ranks, well (`_failure` is None) or not; called once."""
