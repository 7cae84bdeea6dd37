"""The connections of a process to the others of its run: the first failure breaks all of them.

A subclass has the connections of its transport; this module has the common part: the first failure,
on whatever rank, ends every call of this process and is announced to all others.

    rank 2 ends          rank 1, inside a call           rank 0, which computes
                         transport: connection reset
                         `connection_lost`: asks the
                         failure detector who ended
                         announces "rank 2 has ended" -> its failure detector reads that
                         raises it, with the step        its next call raises it

`failure_detector` looks for failures; ranks announce them through the `control_store`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.errors import BoxingError, words_of
from sbp_core.processes.calls import Arrivals, PendingCall, PendingCalls
from sbp_core.processes.control_store import ControlStore
from sbp_core.processes.failure_detector import INTERVAL_S, FailureDetector
from sbp_core.processes.membership import Member, MemberState, Siblings, did_not_open, state_of
from sbp_core.processes.survivors import Survivors

_log = logging.getLogger(__name__)

#: Seconds that a rank waits at its close until no other rank needs it; and the longer time if a
#: signal has stopped one of them, after which that rank counts as failed.
CLOSE_TIMEOUT_S, _STOPPED_TIMEOUT_S = 10.0, 20.0

#: Seconds after which a rank that waits in a collective announces itself to the other ranks.
PATIENCE_S = 0.2

#: Seconds to find out why a connection broke: which rank ended, or which failure was announced.
_REASON_S = 1.0

#: Seconds that a failed rank waits at its close for the others to read the reason.
_ACKNOWLEDGE_S = 1.0


class Connections(ABC):
    """The connections of one process to all other processes; the first failure breaks them all.

    A subclass calls `rendezvous` once other ranks may learn of this one.

    Args:
        control_store: The control store of this rank.
    """

    #: The errors of the transport, and the text before them in messages.
    transport_errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)
    transport_says: ClassVar[str] = ""

    def __init__(self, control_store: ControlStore) -> None:
        self.control_store = control_store
        #: The collectives that this rank has begun.
        self.arrivals = Arrivals(control_store)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        #: A failure that the detector found and no call has raised yet: `close` raises it.
        self._untold = ""
        self._calls = PendingCalls()
        #: Whether all ranks have registered, so that they read this rank's announcements.
        self._met = False
        self._detector: FailureDetector | None = None

    def rendezvous(self, limit_s: float) -> None:
        """Register, wait until every rank has registered, and look for failures from then on.

        Args:
            limit_s: Seconds to wait for the others.

        Raises:
            BoxingError: a rank did not come, or ended.
        """
        store = self.control_store
        store.register(Member.of_this_process(store.rank))

        siblings = Siblings(store.rank)
        looked = time.monotonic()

        def over() -> bool:
            nonlocal looked
            if store.all_announced("member") or store.failure() is not None:
                return True
            # Not at each look: it reads the state of every process of this host.
            if time.monotonic() < looked + INTERVAL_S:
                return False
            looked = time.monotonic()
            return bool(self._ended_members() or siblings.ended())

        in_time = store.wait_for(over, limit_s)
        members = store.members()
        missing = [rank for rank in range(store.size) if rank not in members]
        if missing:
            ended = [f"{member.rank} (pid {member.pid})" for member in self._ended_members()]
            ended += [str(rank) for rank in siblings.ended() if rank in missing]
            why = store.failure() or (f"ended before: ranks {', '.join(ended)}" if ended else "")
            error = did_not_open(
                store.rank, missing, why, waited="" if in_time else f"{limit_s:g} s "
            )
            store.announce_failure(f"rank {store.rank} reported: {words_of(error)}")
            store.close()
            raise error
        self._met = True
        if store.size > 1:
            self._detector = FailureDetector(
                store, members, self._calls, self._fail_because, self.arrivals
            )
            self._detector.start()

    # Calls.

    def pending(self, call: CollectiveCall) -> PendingCall:
        """Return a context in which a call is pending: if it takes long, other ranks can see it."""
        return PendingCall(self._calls, call)

    def describe_ranks(self, ranks: Collection[int]) -> Sequence[str]:
        """Return one line about each rank that did not arrive."""
        return () if self._detector is None else self._detector.describe(ranks)

    def wait_for_group(self, call: CollectiveCall, name: str, ranks: tuple[int, ...]) -> None:
        """Wait until all ranks of a group are ready to connect it; this rank is.

        Libraries connect without a deadline of ours, and do not name the ranks that are missing.

        Raises:
            BoxingError: a rank did not come in time, or has failed.
        """
        store = self.control_store
        store.say(f"join/{name}", ranks=ranks)

        def over() -> bool:
            self.check_peers(call)
            return not store.not_joined(name, ranks)

        if not store.wait_for(over, call.left_s):
            raise self.call_failed(call, call.missing(store.not_joined(name, ranks)))

    def check_usable(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if the connections were closed or have failed."""
        if self._closed:
            raise call.failed("the boxing backend was closed", todo="open a new one")
        if self._failure is not None:
            raise self._failed_before(call, self._failure) from self._failure

    def check_peers(self, call: CollectiveCall) -> None:
        """Raise `BoxingError` if waiting is hopeless, according to other ranks' announcements."""
        self.check_usable(call)
        reason = self.control_store.failure() if self._met else None
        if reason is not None:
            raise self.connection_lost(call, reason)

    def call_failed(self, call: CollectiveCall, error: BoxingError) -> BoxingError:
        """Break everything because a call failed; return the error to raise."""
        if self._failure is not None:
            return self._failed_before(call, self._failure)
        self.fail(error)
        return error

    def _failed_before(self, call: CollectiveCall, failure: BaseException) -> BoxingError:
        """Return the error of a call that fails because of an earlier failure."""
        self._untold = ""
        if isinstance(failure, BoxingError) and failure.todo:
            return call.failed(words_of(failure), todo=failure.todo)
        return call.failed(words_of(failure))

    def connection_lost(self, call: CollectiveCall, report: str) -> BoxingError:
        """Break everything because a connection broke; return the error to raise, with the reason.

        Args:
            call: The call that noticed.
            report: The message of the transport, which usually names no rank.
        """
        if self._failure is None:
            reason = None if self._detector is None else self._detector.investigate(_REASON_S)
            self._fail_because(reason or f"a rank has ended, or its connection is lost ({report})")
        if self._failure is None:
            return call.failed(report)
        return self._failed_before(call, self._failure)

    @contextlib.contextmanager
    def guard(self, call: CollectiveCall) -> Iterator[None]:
        """Break everything if the block fails; the error names the boxing step and the reason."""
        try:
            yield
        except BoxingError as error:
            if self._failure is None:
                self.fail(error)
            raise
        except self.transport_errors as error:
            raise self.transport_failed(call, error) from error

    def transport_failed(self, call: CollectiveCall, error: Exception) -> BoxingError:
        """Break everything because the transport raised an error; return the error to raise.

        For callers where entering `guard` would take longer than a small message.
        """
        return self.connection_lost(call, f"{self.transport_says}{error}")

    def await_collective(
        self,
        call: CollectiveCall,
        ranks: tuple[int, ...],
        number: int,
        wait: Callable[[float], bool],
    ) -> None:
        """Wait for a collective that has begun, which is the `number`-th of its group.

        Ranks that wait for long publish their counts, to name the missing ranks at the deadline.

        Args:
            call: The call that waits.
            ranks: The group.
            number: The result of `arrivals.begin`.
            wait: Waits for the given seconds; returns whether the collective has ended.

        Raises:
            BoxingError: a rank did not come in time, or has failed.
        """
        try:
            if not wait(min(PATIENCE_S, call.left_s / 2)):
                self.arrivals.tell(ranks)
                if not wait(call.left_s):
                    missing = self.arrivals.missing(ranks, number)
                    raise self.call_failed(call, call.missing(missing))
        except BoxingError:
            raise
        except self.transport_errors as error:
            raise self.transport_failed(call, error) from error
        self.arrivals.end(ranks)

    # The end.

    @property
    def is_well(self) -> bool:
        """Whether nothing has failed, here or on ranks that announced a failure."""
        return self._failure is None and self._met and self.control_store.failure() is None

    def known_failure(self) -> str:
        """Return the failure of this rank, or one that another announced; "" if none."""
        self._untold = ""
        if self._failure is not None:
            return words_of(self._failure)
        return (self.control_store.failure() or "") if self._met and not self._closed else ""

    def survivors(self, limit_s: float) -> Survivors:
        """See `BoxingBackend.survivors`."""
        if self._failure is None and (reason := self.known_failure()):
            self._fail_because(reason)  # neither a call nor the detector has noticed it so far
        if self._failure is None or not self._met or self._closed:
            raise BoxingError("survivors are asked for when a run has failed, and before it closes")
        return Survivors.agree(self.control_store, limit_s)

    def failure_reason(self) -> str | None:
        """Return why waiting for other ranks is hopeless, or None if it is not."""
        return None if self._detector is None else self._detector.failure_reason()

    def fail(self, error: BaseException) -> None:
        """Make every call fail, here and on the ranks that wait for this one."""
        words = words_of(error)
        self._untold = ""  # a failure of this rank hides failures of other ranks
        self._break(
            error, f"rank {self.control_store.rank} reported: {words}" if self._met else words
        )

    def close(self) -> None:
        """Release everything; waits a while for messages in transit and for slower ranks.

        Raises:
            BoxingError: another rank ended or hangs without having closed its connections, and no
                call has raised that; everything is released.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        store = self.control_store
        if self._failure is not None and self._met:
            # Give the others a moment to read why this rank leaves: it may host their store.
            members = {*store.members()}
            others = members.difference(store.standing_still(members))
            store.wait_for(
                lambda: store.is_lost() or not store.not_acknowledged(others), _ACKNOWLEDGE_S
            )
        # In this order: `_release` asks the detector whether to wait for other ranks, and reports
        # in the control store that they need not wait for this one.
        self._release()
        if self._detector is not None:
            self._detector.stop()
        if self._met:
            store.close()
        if self._failure is not None:
            # An error keeps its traceback's frames alive, and these keep groups and messages. The
            # code that caught it may keep them, but a closed backend must not.
            self._failure = BoxingError(words_of(self._failure))
        if self._untold:
            raise BoxingError(
                f"the end of the run could not complete: {self._untold}",
                where=f"rank {store.rank}, which had done its part",
                todo="see what that rank did after its last step",
            )

    def end_with_program(self, error: BaseException) -> None:
        """Announce that this process ends without closing its connections."""
        self.fail(error)
        self.close()
        gc.freeze()  # now, because the `atexit` handler of `_break` would come too late

    def _fail_because(self, reason: str) -> None:
        """Break everything because of another rank's failure."""
        found = "" if self._detector is None else self._detector.found
        self._break(BoxingError(reason), reason, untold=found)

    def _break(self, error: BaseException, announced: str, untold: str = "") -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure, self._untold = error, untold
        # At its end, a program collects garbage among all its objects. With torch's objects this
        # takes almost a second, in which other ranks, and the supervisor, still see it run.
        atexit.register(gc.freeze)
        if self._met:
            self.control_store.say("acknowledged")
        self._announce(announced)

    def _await_others(self) -> bool:
        """Wait until no rank needs this one; return whether all of them are well.

        A rank that is still in a step needs the connections of ranks that are finished, and all
        need the store, which one of them may host. A running rank is only slow, and may continue
        alone; a rank that is stopped or silent has failed, as in a step.
        """
        store, detector = self.control_store, self._detector
        if detector is None:
            return store.failure() is None

        def over() -> bool:
            return store.all_deregistered() or self.failure_reason() is not None

        detector.is_leaving = True
        if not store.wait_for(over, CLOSE_TIMEOUT_S):
            store.wait_for(lambda: over() or not detector.stopped_looks, _STOPPED_TIMEOUT_S)
        if store.all_deregistered():
            # The rank that hosts the store may have left because all others had.
            return store.is_lost() or store.failure() is None
        if reason := detector.investigate(0.0, CLOSE_TIMEOUT_S):
            store.announce_failure(reason)
        else:
            _log.warning("rank %d closes before the other ranks have closed", store.rank)
            return False
        self._untold = detector.found
        return store.failure() is None

    def _ended_members(self) -> list[Member]:
        store = self.control_store
        members = store.members()
        me = members.get(store.rank)
        return [
            member
            for member in members.values()
            if me is not None and state_of(member, me) is MemberState.ENDED
        ]

    @abstractmethod
    def _announce(self, text: str) -> None:
        """Report to the other ranks why the run failed, and unblock waiting calls; called once."""

    @abstractmethod
    def _release(self) -> None:
        """Leave the other ranks, well (`_failure` is None) or not; called once.

        It deregisters, and frees the transport's resources once the other ranks do not need them.
        """
