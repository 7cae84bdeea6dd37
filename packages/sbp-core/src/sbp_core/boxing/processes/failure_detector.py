"""The thread by which a process learns that another one has failed, ended or left.

Without it a rank would learn so only where it happens to be connected to that other one, by an
error of the transport that names nobody, and a rank that computes not at all. Looks at the board
and at the processes of this host; what then breaks is `connections`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from sbp_core.boxing.processes.call import CollectiveCall
from sbp_core.boxing.processes.control_store import ControlStore
from sbp_core.boxing.processes.membership import Member, MemberState, state_of
from sbp_core.boxing.slices import transfer_pieces
from sbp_core.boxing.step import StepKind
from sbp_core.boxing.supervision.root_cause import SILENT, STOPPED

#: Seconds between two looks.
INTERVAL_S = 0.25

#: Seconds between two looks of a rank whose connection just broke.
_HURRY_S = 0.02

#: Seconds that a call takes before the rank notes where it is.
_LONG_S = 0.2

#: Seconds that a call may last after a rank that it needs has left: what that rank has sent before
#: may still be on its way.
_GRACE_S = 2.0

#: Seconds between two signs of life, for ranks on other hosts.
_BEAT_S = 0.5

#: Seconds without a sign of life after which a rank is lost, if a connection broke.
_SILENCE_S = 3.0

#: Seconds to listen for a sign of life of a rank that did not arrive.
_LISTEN_S = 1.2


class Calls:
    """The calls of one process that have begun, at most one a thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, CollectiveCall] = {}
        #: The call that began last, on whichever thread.
        self.latest: CollectiveCall | None = None

    def begin(self, call: CollectiveCall) -> None:
        """Note that a call begins on this thread."""
        self._by_thread[threading.get_ident()] = self.latest = call

    def end(self) -> None:
        """Note that the call of this thread is over."""
        self._by_thread.pop(threading.get_ident(), None)

    def under_way(self) -> list[CollectiveCall]:
        """Return the calls that are not over."""
        return list(self._by_thread.values())


class PendingCall:
    """The time in which a call is under way; a class, as generators take longer to enter.

    Args:
        calls: The calls of this process.
        call: One of them.
    """

    __slots__ = ("_call", "_calls")

    def __init__(self, calls: Calls, call: CollectiveCall) -> None:
        self._calls = calls
        self._call = call

    def __enter__(self) -> None:
        self._calls.begin(self._call)

    def __exit__(self, *_: object) -> None:
        self._calls.end()


class FailureDetector:
    """What one process sees of the others.

    Args:
        board: The notes of the run.
        members: The processes of all ranks, by rank.
        calls: The calls of this process.
        learned: Called once, on the thread of the watch, with why the run failed.
    """

    def __init__(
        self,
        board: ControlStore,
        members: Mapping[int, Member],
        calls: Calls,
        learned: Callable[[str], None],
    ) -> None:
        self._board = board
        self._members = members
        self._me = members[board.rank]
        self._here = [
            member
            for member in members.values()
            if member.is_beside(self._me) and member.rank != board.rank
        ]
        self._away = [rank for rank, member in members.items() if not member.is_beside(self._me)]
        self._calls = calls
        self._learned = learned
        #: When a rank was first seen to have left, by rank.
        self._left: dict[int, float] = {}
        self._lost_since: float | None = None
        self._noted = ""
        self._beats = 0
        self._next_beat = 0.0
        self._stop = threading.Event()
        # A daemon: it may be inside a call of the transport when the process ends.
        self._thread = threading.Thread(target=self._run, name="sbp-watch", daemon=True)

    def start(self) -> None:
        """Begin to look, every `INTERVAL_S` seconds."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, or leave it behind if it hangs."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * INTERVAL_S)

    def reason(self) -> str | None:
        """Look once; return why the run cannot go on, or None if nothing is wrong."""
        failure = self._board.failure()
        if failure is None:
            self._lost_since = None
            return self._ended() or self._abandoned()
        return self._reason_of_loss(failure) if self._board.is_lost() else failure

    def find(self, limit_s: float) -> str | None:
        """Look for why a connection broke, for `limit_s` seconds.

        Ranks on other hosts are listened to for a while longer, if there are any.
        """
        end = time.monotonic() + limit_s
        while (reason := self.reason()) is None and time.monotonic() < end:
            time.sleep(_HURRY_S)
        if reason is not None:
            return reason
        silent = self._silent(self._away, _SILENCE_S)
        left = self._board.left(silent)
        silent = [rank for rank in silent if rank not in left]
        if (reason := self.reason()) is not None or not silent:
            return reason
        names = ", ".join(self._name(rank) for rank in silent)
        return f"{names} has given no sign of life for {_SILENCE_S:g} s: ended, or cut off"

    def witness(self, ranks: Collection[int]) -> list[str]:
        """Say of each rank what its process does, and where it was last.

        Of other ranks, those that do nothing any more: some of `ranks` may be waiting for them.
        """
        silent = self._silent(self._away, _LISTEN_S)
        stopped = [
            member.rank
            for member in self._here
            if state_of(member, self._me) is MemberState.STOPPED
        ]
        still = [rank for rank in sorted({*silent, *stopped}) if rank not in ranks]
        lines = []
        for rank in (*ranks, *still):
            if rank in self._away:
                state = SILENT if rank in silent else "gives signs of life"
            else:
                state = _STATES[state_of(self._members[rank], self._me)]
            place = self._board.last_seen(rank)
            lines.append(f"{self._name(rank)}: {state}" + (f"; it {place}" if place else ""))
        return lines

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._note_place()
            self._beat()
            reason = self.reason()
            if reason is not None:
                self._learned(reason)
                return

    def _note_place(self) -> None:
        """Note where this rank is, if it is there for long."""
        under_way, latest = self._calls.under_way(), self._calls.latest
        longest = max(under_way, key=lambda call: call.age_s, default=latest)
        if longest is None or longest.age_s < _LONG_S:
            return
        doing = "waits in" if under_way else "was last in"
        place = f"{doing} boxing step {longest.tag!r}"
        if place != self._noted:
            self._board.come_to(place)
            self._noted = place

    def _beat(self) -> None:
        if self._away and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._beats += 1
            self._board.beat(self._beats, self._away)

    # What can be wrong.

    def _ended(self) -> str | None:
        """Name the processes of this host that have ended without leaving."""
        ended = self._not_running()
        if not ended:
            return None
        # Asked last: a rank that leaves, or says why it failed, does so before it ends.
        left = self._board.left(ended)
        self._left |= dict.fromkeys(left, time.monotonic())
        unseen = [rank for rank in ended if rank not in left]
        return (self._board.failure() or self._say_ended(unseen)) if unseen else None

    def _reason_of_loss(self, failure: str) -> str | None:
        """Say why notes do not come any more: often, whoever kept them has ended."""
        if self._lost_since is None:
            self._lost_since = time.monotonic()
        ended = self._not_running()
        if ended:
            return self._say_ended(ended)
        # A process closes its connections a little before it has ended.
        if time.monotonic() - self._lost_since < 2 * INTERVAL_S:
            return None
        return failure

    def _abandoned(self) -> str | None:
        """Name the ranks that have left although a call still waits for them."""
        now = time.monotonic()
        for call in self._calls.under_way():
            if call.age_s < _LONG_S:
                continue
            for rank in self._board.left(awaited(call)):
                since_s = now - self._left.setdefault(rank, now)
                if min(since_s, call.age_s) >= _GRACE_S:
                    return f"{self._name(rank)} has closed its boxing backend, and left"
        return None

    def _silent(self, ranks: Collection[int], listen_s: float) -> list[int]:
        """Return those of some ranks on other hosts that give no sign of life for a while."""
        before = {rank: self._board.last_beat(rank) for rank in ranks}
        silent, end = list(ranks), time.monotonic() + listen_s
        while silent and time.monotonic() < end:
            time.sleep(_HURRY_S)
            silent = [rank for rank in silent if self._board.last_beat(rank) == before[rank]]
        return silent

    def _not_running(self) -> list[int]:
        """Return the ranks of this host that have ended and are not known to have left."""
        return [
            member.rank
            for member in self._here
            if member.rank not in self._left and state_of(member, self._me) is MemberState.ENDED
        ]

    def _say_ended(self, ranks: Sequence[int]) -> str:
        names = ", ".join(self._name(rank) for rank in ranks)
        return f"{names} {'has' if len(ranks) == 1 else 'have'} ended"

    def _name(self, rank: int) -> str:
        return self._members[rank].seen_from(self._me)


_STATES = {
    MemberState.RUNNING: "is running",
    MemberState.STOPPED: STOPPED,
    MemberState.ENDED: "has ended",
    MemberState.UNKNOWN: "cannot be seen from here",
}


def awaited(call: CollectiveCall) -> list[int]:
    """Return the ranks that a collective or receive waits for."""
    if call.step.kind is not StepKind.TRANSFER:
        return [rank for rank in call.step.group(call.rank) if rank != call.rank]
    pieces = transfer_pieces(call.step)
    senders = {piece.sender for piece in pieces if piece.receiver == call.rank}
    return sorted(senders - {call.rank})
