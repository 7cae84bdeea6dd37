"""The failure detector: a thread that notices that another process failed, ended or deregistered.

Without it, a rank would notice only by an error of a connection to that process, which names no
rank; and a rank that computes would not notice at all. The thread polls the control store and the
processes of this host. If it finds a failure, it breaks the `connections`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.boxing.slices import transfer_pieces
from sbp_core.boxing.step import StepKind
from sbp_core.processes.calls import Arrivals, PendingCalls
from sbp_core.processes.control_store import ControlStore
from sbp_core.processes.exit_report import SILENT, STOPPED
from sbp_core.processes.membership import Member, MemberState, state_of

#: Seconds between two looks.
INTERVAL_S = 0.25

#: Seconds between two looks by a rank whose connection just broke.
_HURRY_S = 0.02

#: Seconds that a call takes before the rank reports where it is.
_LONG_S = 0.2

#: Seconds that a call may last after a rank that it needs has deregistered: earlier messages of
#: that rank may still be in transit.
_GRACE_S = 2.0

#: Consecutive looks that see a rank stopped by a signal, while a call waits, before it counts as
#: failed: 10 s, whatever the deadline of that call, because that may be long for checkpoints.
#: Not seconds: while a whole host is suspended, this process does not look either.
_STOPPED_LOOKS = 40

#: Seconds between two heartbeats, for ranks on other hosts.
_HEARTBEAT_S = 0.5

#: Seconds without a heartbeat after which a rank is lost, if a connection broke.
_SILENCE_S = 3.0

#: Seconds to listen for a heartbeat of a rank that did not arrive.
_LISTEN_S = 1.2


class FailureDetector:
    """Detects, for one process, which other ranks have failed, and why.

    Args:
        store: The control store of this rank.
        members: The processes of all ranks, by rank.
        calls: The calls of this process.
        on_failure: Called once, on the detector's thread, with the reason why the run failed.
        arrivals: The counts of this rank; the detector publishes those that others may wait for.
    """

    def __init__(
        self,
        store: ControlStore,
        members: Mapping[int, Member],
        calls: PendingCalls,
        on_failure: Callable[[str], None],
        arrivals: Arrivals | None = None,
    ) -> None:
        self._store = store
        self._arrivals = arrivals
        self._members = members
        self._me = members[store.rank]
        near = {rank for rank, member in members.items() if member.shares_pids_with(self._me)}
        #: The other ranks of this host, and the ranks of other hosts.
        self._here, self._away = sorted(near - {store.rank}), sorted({*members} - near)
        self._calls = calls
        self._on_failure = on_failure
        #: The time at which a rank was first seen to have deregistered, by rank.
        self._deregistered: dict[int, float] = {}
        #: Number of consecutive looks that saw a rank stopped while a call waited for it; it fails
        #: if it stays stopped.
        self.stopped_looks: Counter[int] = Counter()
        self._stopped_for_long = ""
        #: The failure that this rank has detected itself, if there is one.
        self.found = ""
        #: Whether this rank has finished, and waits for all others to finish.
        self.is_leaving = False
        self._lost_since: float | None = None
        self._reported = ""
        self._num_heartbeats = 0
        self._next_heartbeat = 0.0
        self._stop = threading.Event()
        # A daemon: it may be inside a call of the transport when the process ends.
        self._thread = threading.Thread(target=self._run, name="sbp-failure-detector", daemon=True)

    def start(self) -> None:
        """Start the thread, which looks every `INTERVAL_S` seconds."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, or abandon it if it hangs."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * INTERVAL_S)

    def failure_reason(self) -> str | None:
        """Look once; return why the run cannot continue, or None if nothing is wrong."""
        failure = self._store.failure()
        if failure is not None and not self._store.is_lost():
            return failure
        if failure is not None:
            reason = self._explain_loss(failure)
        else:
            self._lost_since = None
            reason = self._find_ended() or self._find_deregistered() or self._stopped_for_long
        self.found = reason or self.found
        return reason or None

    def investigate(self, limit_s: float, listen_s: float | None = None) -> str | None:
        """Look for up to `limit_s` seconds why a connection broke or a rank is missing.

        For ranks on other hosts, it waits for heartbeats for `listen_s` seconds, or the usual time.
        """
        listen_s = listen_s or _SILENCE_S
        end = time.monotonic() + limit_s
        while (reason := self.failure_reason()) is None and time.monotonic() < end:
            time.sleep(_HURRY_S)
        if reason is not None:
            return reason
        silent = self._silent(self._away, listen_s)
        silent = sorted({*silent}.difference(self._store.deregistered(silent)))
        if (reason := self.failure_reason()) is not None or not silent:
            return reason
        self.found = (
            f"{self._names(silent)} has given no sign of life for {listen_s:g} s: ended, or cut off"
        )
        return self.found

    def describe(self, ranks: Collection[int]) -> list[str]:
        """Describe each of these ranks: the state of its process, and its last location.

        Stopped or silent ranks are described, too: some of `ranks` may wait for them.
        """
        silent = self._silent(self._away, _LISTEN_S)
        stopped = self._stopped()
        still = [rank for rank in sorted({*silent, *stopped}) if rank not in ranks]
        lines = []
        for rank in (*ranks, *still):
            if rank in self._away:
                state = SILENT if rank in silent else "gives signs of life"
            else:
                state = _STATES[self._state(rank)]
            location = self._store.announced("location", rank)
            where = f"; it {location}" if location else ""
            lines.append(f"{self._names([rank])}: {state}{where}")
        return lines

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._report_location()
            if self._arrivals is not None:
                self._arrivals.tell_overdue(_LONG_S)
            if self._away and time.monotonic() >= self._next_heartbeat:
                self._next_heartbeat = time.monotonic() + _HEARTBEAT_S
                self._num_heartbeats += 1
                self._store.say("heartbeat", str(self._num_heartbeats), self._away)
            if reason := self.failure_reason() or self._find_stopped():
                self._on_failure(reason)
                return

    def _report_location(self) -> None:
        """Publish the location of this rank if it has been there for long."""
        pending, latest = self._calls.all(), self._calls.latest
        longest = max(pending, key=lambda call: call.age_s, default=latest)
        if longest is None or longest.age_s < _LONG_S:
            return
        doing = "waits in" if pending else "was last in"
        location = f"{doing} boxing step {longest.tag!r}"
        if location != self._reported:
            self._store.say("location", location)
            self._reported = location

    # Possible failures.

    def _find_ended(self) -> str | None:
        """Return text about processes of this host that have ended without deregistering."""
        if not (ended := self._not_running()):
            return None
        # Read last: a rank deregisters, or reports why it failed, before it ends.
        deregistered = self._store.deregistered(ended)
        self._deregistered |= dict.fromkeys(deregistered, time.monotonic())
        if not (unexplained := [rank for rank in ended if rank not in deregistered]):
            return None
        if (failure := self._store.failure()) is not None:
            return failure
        # If the store does not answer, one of the stopped ranks hosts it. Ranks that have ended
        # meanwhile may have deregistered, which cannot be read.
        is_silent = self._store.is_lost(if_silent=True) and not self._store.is_lost()
        if is_silent and (stopped := self._stopped()):
            return f"{self._names(stopped)} {STOPPED}, and the store does not answer"
        return self._say_ended(unexplained)

    def _explain_loss(self, failure: str) -> str | None:
        """Return why the control store is lost: often, the process that hosted it has ended."""
        self._lost_since = self._lost_since or time.monotonic()
        if ended := self._not_running():
            return self._say_ended(ended)
        # A process closes its connections a little before it has ended.
        if time.monotonic() - self._lost_since < 2 * INTERVAL_S:
            return None
        return failure

    def _find_deregistered(self) -> str | None:
        """Return text about a rank that has deregistered although a call here waits for it."""
        now = time.monotonic()
        for call in self._calls.all():
            if call.age_s < _LONG_S:
                continue
            for rank in self._store.deregistered(awaited(call)):
                since_s = now - self._deregistered.setdefault(rank, now)
                if min(since_s, call.age_s) >= _GRACE_S:
                    return (
                        f"{self._names([rank])} has closed its boxing backend and left; "
                        "all ranks must make the same calls before one of them closes"
                    )
        return None

    def _find_stopped(self) -> str | None:
        """Return text about a stopped rank of this host for which this rank waits.

        This rank waits in a call, or for all other ranks before it leaves. Call this once every
        `INTERVAL_S`.
        """
        needed = {rank for call in self._calls.all() for rank in awaited(call)}
        if self.is_leaving:
            needed |= {*self._here}.difference(self._store.deregistered(self._here))
        seen = needed.intersection(self._stopped()) if needed else ()
        self.stopped_looks = Counter({rank: self.stopped_looks[rank] + 1 for rank in seen})
        for rank, looks in self.stopped_looks.items():
            if looks >= _STOPPED_LOOKS:
                stopped_s = looks * INTERVAL_S
                self._stopped_for_long = self.found = (
                    f"{self._names([rank])} {STOPPED}, and has been for {stopped_s:g} s"
                )
        return self._stopped_for_long or None

    def _silent(self, ranks: Collection[int], listen_s: float) -> list[int]:
        """Return the ranks on other hosts, among those given, without a heartbeat for a while."""
        heard = partial(self._store.announced, "heartbeat")
        before = {rank: heard(rank) for rank in ranks}
        silent, end = list(ranks), time.monotonic() + listen_s
        while silent and time.monotonic() < end:
            time.sleep(_HURRY_S)
            silent = [rank for rank in silent if heard(rank) == before[rank]]
        return silent

    def _stopped(self) -> list[int]:
        """Return the ranks of this host that a signal has stopped."""
        return [rank for rank in self._here if self._state(rank) is MemberState.STOPPED]

    def _not_running(self) -> list[int]:
        """Return the ranks of this host that have ended and are not known to have deregistered."""
        others = [rank for rank in self._here if rank not in self._deregistered]
        return [rank for rank in others if self._state(rank) is MemberState.ENDED]

    def _state(self, rank: int) -> MemberState:
        return state_of(self._members[rank], self._me)

    def _say_ended(self, ranks: Sequence[int]) -> str:
        return f"{self._names(ranks)} {'has' if len(ranks) == 1 else 'have'} ended"

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._members[rank].name_for(self._me) for rank in ranks)


_STATES = {
    MemberState.RUNNING: "is running",
    MemberState.STOPPED: STOPPED,
    MemberState.TRACED: "is held by a debugger",
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
