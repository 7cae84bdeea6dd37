"""The calls of one process, for its failure detector and for the other ranks.

`PendingCalls` are those that have begun and are not over. `Arrivals` say to how many collectives of
each group this rank has come, which tells others who is missing. Ranks issue the collectives of a
group in one order, so a count stands for all of them. A rank tells its count when it waits long;
and while it computes between the begin and the end of a collective, the failure detector does, so
that it is not taken for one that did not come:

    rank 0   begin(7)  computes, for long .......      tells "7"
    rank 1   begin(7)  wait(7): who is missing?        finds "7" of rank 0, "6" of rank 2
    rank 2   hangs
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from hashlib import blake2b

from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.processes.control_store import ControlStore


def group_name(ranks: tuple[int, ...]) -> str:
    """Return how the ranks of a group call it among themselves."""
    return "-".join(map(str, ranks))


def tag_number(tag: str, upper: int) -> int:
    """Return the number of a tag, in [0, upper), equal on every rank.

    Transports take numbers for tags, and a hash of the text needs no agreement between the ranks.
    That two tags share a number does harm only if both are under way between the same two ranks,
    and are received in another order than they were sent in.
    """
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "big") % upper


class PendingCalls:
    """The calls of one process that are under way, at most one a thread."""

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

    def all(self) -> list[CollectiveCall]:
        """Return the calls that are not over."""
        # A copy, made by `list` in one go: other threads begin and end calls meanwhile.
        return list(self._by_thread.values())


@dataclass(slots=True, eq=False)
class PendingCall:
    """The time in which a call is under way; a class, because generators take longer to enter.

    Args:
        calls: The calls of this process.
        call: One of them.
    """

    calls: PendingCalls
    call: CollectiveCall

    def __enter__(self) -> None:
        self.calls.begin(self.call)

    def __exit__(self, *_: object) -> None:
        self.calls.end()


@dataclass(slots=True)
class _Count:
    """Of one group.

    Args:
        name: Of the group.
        latest: The number of the collective that began last, from 0.
        begun_s: When it did, on the clock of `time.monotonic`.
        num_open: Collectives that have begun and are not over.
        told: The number that the others know.
    """

    name: str
    latest: int = -1
    begun_s: float = 0.0
    num_open: int = 0
    told: int = -1


class Arrivals:
    """The counts of one rank.

    `begin` and `end` are called by the thread that does so, `tell_overdue` by the detector's.

    Args:
        store: Of this rank.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._counts: dict[tuple[int, ...], _Count] = {}

    def begin(self, ranks: tuple[int, ...]) -> int:
        """Count a collective of a group that begins; return its number."""
        count = self._counts.get(ranks)
        if count is None:
            count = self._counts[ranks] = _Count(group_name(ranks))
        count.latest += 1
        count.num_open += 1
        count.begun_s = time.monotonic()
        return count.latest

    def end(self, ranks: tuple[int, ...]) -> None:
        """Count a collective that is over."""
        self._counts[ranks].num_open -= 1

    def tell(self, ranks: tuple[int, ...]) -> None:
        """Tell the others of a group how far this rank has come."""
        count = self._counts[ranks]
        # Read once: another collective may begin meanwhile, on the other thread.
        count.told = number = count.latest
        self._store.say(f"waiting/{count.name}", str(number), ranks)

    def tell_overdue(self, age_s: float) -> None:
        """Tell it of the groups in which nothing has begun for so long, and something is open."""
        now = time.monotonic()
        for ranks, count in list(self._counts.items()):
            if count.num_open and count.told < count.latest and now - count.begun_s >= age_s:
                self.tell(ranks)

    def missing(self, ranks: tuple[int, ...], number: int) -> list[int]:
        """Return the ranks that have not come to a collective, as far as they told."""
        return self._store.not_waiting(self._counts[ranks].name, number, ranks)
