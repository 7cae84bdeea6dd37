"""Record the pending collective calls of a process, for its failure detector and for other ranks.

`PendingCalls` holds the calls that have begun and not ended. `Arrivals` counts the collectives of
each group that this rank has begun, so that other ranks can find out who is missing. Ranks issue
the collectives of a group in one order, so a count identifies them. A rank publishes its count when
it waits for long. While a rank computes between the begin and the end of a collective, its failure
detector publishes the count, so that the rank does not count as missing:

    rank 0   begin(7)  computes, for long .......      publishes "7"
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
    """Return the name of a group of ranks, in keys of the control store."""
    return "-".join(map(str, ranks))


def tag_number(tag: str, upper: int) -> int:
    """Return the number of a tag, in [0, upper), equal on every rank.

    Transports need numbers as tags; a hash of the text needs no agreement between the ranks. If two
    tags have the same number, this matters only if both are in transit between the same two ranks,
    and are received in another order than they were sent in.
    """
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "big") % upper


class PendingCalls:
    """The calls of one process that have begun and not ended, at most one for each thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, CollectiveCall] = {}
        #: The call that began last, on whichever thread.
        self.latest: CollectiveCall | None = None

    def begin(self, call: CollectiveCall) -> None:
        """Note that a call begins on this thread."""
        self._by_thread[threading.get_ident()] = self.latest = call

    def end(self) -> None:
        """Note that the call of this thread has ended."""
        self._by_thread.pop(threading.get_ident(), None)

    def all(self) -> list[CollectiveCall]:
        """Return the calls that have not ended."""
        # A copy, made by `list` in one go: other threads begin and end calls meanwhile.
        return list(self._by_thread.values())


@dataclass(slots=True, eq=False)
class PendingCall:
    """Context manager that registers a pending call; a generator would be slower to enter.

    Args:
        calls: The calls of this process.
        call: The call.
    """

    calls: PendingCalls
    call: CollectiveCall

    def __enter__(self) -> None:
        self.calls.begin(self.call)

    def __exit__(self, *_: object) -> None:
        self.calls.end()


@dataclass(slots=True)
class _Count:
    """The number of collectives of one group that this rank has begun.

    Args:
        name: The name of the group.
        latest: The number of the collective that began last, from 0.
        begun_s: The time of its begin, on the clock of `time.monotonic`.
        num_open: Collectives that have begun and not ended.
        told: The number that was published last.
    """

    name: str
    latest: int = -1
    begun_s: float = 0.0
    num_open: int = 0
    told: int = -1


class Arrivals:
    """The counts of one rank.

    `begin` and `end` are called by the thread of the collective, `tell_overdue` by the detector's.

    Args:
        store: The control store of this rank.
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
        """Count a collective that has ended."""
        self._counts[ranks].num_open -= 1

    def tell(self, ranks: tuple[int, ...]) -> None:
        """Publish this rank's count to the other ranks of a group."""
        count = self._counts[ranks]
        # Read once: another collective may begin meanwhile, on the other thread.
        count.told = number = count.latest
        self._store.say(f"waiting/{count.name}", str(number), ranks)

    def tell_overdue(self, age_s: float) -> None:
        """Publish counts of groups with an open collective and none begun for `age_s`."""
        now = time.monotonic()
        for ranks, count in list(self._counts.items()):
            if count.num_open and count.told < count.latest and now - count.begun_s >= age_s:
                self.tell(ranks)

    def missing(self, ranks: tuple[int, ...], number: int) -> list[int]:
        """Return the ranks that have not begun a collective, by their published counts."""
        return self._store.not_waiting(self._counts[ranks].name, number, ranks)
