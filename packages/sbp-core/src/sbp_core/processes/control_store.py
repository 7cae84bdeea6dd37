"""The control store: short entries by which the ranks of a run inform each other.

It holds no tensors, and nothing is written on the fast path of a step: only when something takes
long, fails or ends. The failure detector and the errors of boxing calls use it.

| key | is written by | meaning |
|---|---|---|
| `member/RANK` | `register` | the process of the rank |
| `join/GROUP/RANK` | `say` | the rank is ready to connect a group |
| `waiting/GROUP/RANK` | `say` | the number of the group's latest call that it has begun |
| `location/RANK` | `say` | the step in which it is, or was last, as words after its name |
| `heartbeat/RANK` | `say` | a number that changes each time |
| `failure` | `announce_failure` | why the run failed; the first text stays |
| `acknowledged/RANK` | `say` | the rank has read that |
| `survivor/RANK` | `say` | the rank has survived the failure |
| `survivors` | `agree_on_survivors` | all survivors; the first list stays |
| `deregistered/RANK`, `deregistered/any` | `deregister` | the rank (or any) needs no other |
| `transport/...` | `publish` | information that a backend shares between its ranks |

A subclass transports the entries: `key_value_store` keeps them in a key-value store, boxing-nccl
sends them as messages of MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from sbp_core.processes.membership import Member, MemberState, state_of
from sbp_core.processes.waiting import wait_until

#: Characters of a failure that are announced: over MPI a short message is sent without waiting for
#: its receiver; a long one waits.
_LONGEST_TEXT = 2000

#: Keys of which the first value stays; for all other keys, the last value counts.
FIRST_STAYS = ("failure", "survivors")


class StoreSilentError(RuntimeError):
    """The control store does not answer for now."""


class StoreLostError(StoreSilentError):
    """The control store is permanently unreachable; the message has the reason."""


class ControlStore(ABC):
    """The entries of one run, as one rank sees them.

    Only `wait_for` waits for other ranks. Once the store is lost, `failure` reports that, and every
    other method acts as if no rank had written anything: queries about other ranks must not fail.

    Args:
        rank: The rank that reads and writes.
        size: Number of ranks.
    """

    #: Pauses between two looks, in seconds: the first, and the longest.
    pauses_s: ClassVar[tuple[float, float]] = (5e-4, 0.02)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._members: dict[int, Member] = {}

    # Transport of entries: implemented by a subclass.

    @abstractmethod
    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        """Write an entry for some ranks; the last value counts, for `FIRST_STAYS` the first.

        Raises:
            StoreSilentError: it cannot be written.
        """

    @abstractmethod
    def _get(self, key: str) -> str | None:
        """Return an entry, or None if there is none; does not wait for it.

        Raises:
            StoreSilentError: entries cannot be read.
        """

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an entry that was read, to save memory.

        Raises:
            StoreSilentError: it cannot be deleted.
        """

    def _has_all(self, keys: Iterable[str]) -> bool:
        """Return whether there is an entry for each key."""
        return all(self._get(key) is not None for key in keys)

    # Entries of each rank about itself; see the module for the keys. If the store does not answer,
    # writing has no effect: the next reader treats that as a failure.

    def say(self, key: str, value: str = "1", ranks: Iterable[int] | None = None) -> None:
        """Write this rank's entry `key/RANK`, for some ranks or all."""
        self._write(f"{key}/{self.rank}", value, ranks)

    def announced(self, key: str, rank: int) -> str | None:
        """Return the entry of another rank about itself, or None if there is none."""
        return self._read(f"{key}/{rank}")

    def announcing(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks, among those given, that have written an entry."""
        return [rank for rank in ranks if self.announced(key, rank) is not None]

    def all_announced(self, key: str) -> bool:
        """Return whether every rank has written an entry."""
        with suppress(StoreSilentError):
            return self._has_all(f"{key}/{rank}" for rank in range(self.size))
        return False

    # Members.

    def register(self, member: Member) -> None:
        """Publish the process of this rank to all ranks."""
        self.say("member", member.to_json())

    def members(self) -> dict[int, Member]:
        """Return the processes of the ranks that have registered, by rank."""
        for rank in range(self.size):
            if rank not in self._members and (entry := self.announced("member", rank)):
                self._members[rank] = Member.from_json(entry)
        return dict(self._members)

    def standing_still(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks, among those given, whose processes have ended or are stopped.

        Uses only members that have been read already, because the store may be silent.
        """
        me, still = self._members.get(self.rank), (MemberState.STOPPED, MemberState.ENDED)
        known = [] if me is None else [rank for rank in ranks if rank in self._members]
        return [rank for rank in known if me and state_of(self._members[rank], me) in still]

    def not_joined(self, group: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are not ready to connect a group."""
        return self._absent(ranks, lambda rank: self._get(f"join/{group}/{rank}") is not None)

    # Locations of ranks.

    def not_waiting(self, group: str, number: int, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not begun a call of a group, according to their reports."""
        others = [rank for rank in ranks if rank != self.rank]
        return self._absent(
            others, lambda rank: int(self._get(f"waiting/{group}/{rank}") or -1) >= number
        )

    # The end of a run.

    def announce_failure(self, text: str) -> None:
        """Report to all ranks why the run failed; the first text stays."""
        if self._read("failure") is None:
            self._write("failure", text[:_LONGEST_TEXT])

    def failure(self) -> str | None:
        """Return why the run failed, by the first report, or None if it did not."""
        try:
            return self._get("failure")
        except StoreLostError as error:
            return str(error)
        except StoreSilentError:
            return None

    def is_lost(self, *, if_silent: bool = False) -> bool:
        """Return whether entries are permanently unreadable; `if_silent` if that is not known."""
        try:
            self._get("failure")
        except StoreSilentError as error:
            return if_silent or isinstance(error, StoreLostError)
        return False

    def not_acknowledged(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that may not know why the run failed, and still need others."""
        ranks = {*ranks} - {self.rank}
        ranks -= {*self.announcing("acknowledged", ranks)}
        return sorted(ranks - {*self.announcing("deregistered", ranks)})

    def agree_on_survivors(self, proposed: str) -> str | None:
        """Return the survivors, by the first proposal written; None if the store is lost."""
        self._write("survivors", proposed)
        return self._read("survivors")

    def deregister(self) -> None:
        """Report to all ranks that this one needs no other rank any more: it may end now."""
        self.say("deregistered")
        self._write("deregistered/any")

    def deregistered(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks, among those given, that need no other rank any more."""
        # Called often, and no rank deregisters before the run ends: check one entry first.
        if self._read("deregistered/any") is None:
            return []
        return self.announcing("deregistered", ranks)

    def all_deregistered(self) -> bool:
        """Return whether no rank needs this one any more, or no rank is reachable."""
        try:
            return self._has_all(f"deregistered/{rank}" for rank in range(self.size))
        except StoreSilentError as error:
            # The rank that hosts the store leaves last: if it is lost, all others have left.
            return isinstance(error, StoreLostError)

    def close(self) -> None:  # noqa: B027 (usually there is nothing to release)
        """Release the transport of the entries; no method may be called afterwards."""

    # Entries of a backend.

    def publish(self, key: str, text: str, ranks: Iterable[int]) -> None:
        """Write a backend-specific entry for some ranks."""
        self._write(f"transport/{key}", text, ranks)

    def lookup(self, key: str) -> str | None:
        """Return an entry that was published, or None if it has not arrived."""
        return self._read(f"transport/{key}")

    def take(self, key: str) -> str | None:
        """Return an entry that was published for this rank alone, and delete it."""
        if (text := self.lookup(key)) is not None:
            with suppress(StoreSilentError):
                self._delete(f"transport/{key}")
        return text

    def wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Poll until `done()` is true or `limit_s` seconds have passed; return the result."""
        first_s, longest_s = self.pauses_s
        return wait_until(done, limit_s, first_pause_s=first_s, longest_pause_s=longest_s)

    def _absent(self, ranks: Iterable[int], has_come: Callable[[int], bool]) -> list[int]:
        """Return the ranks that have not come; if the store is silent, those that cannot come."""
        ranks = list(ranks)
        with suppress(StoreSilentError):
            return [rank for rank in ranks if not has_come(rank)]
        # Better to report the ranks whose processes stand still than all other ranks.
        return self.standing_still(ranks) or [rank for rank in ranks if rank != self.rank]

    def _write(self, key: str, value: str = "1", ranks: Iterable[int] | None = None) -> None:
        with suppress(StoreSilentError):
            self._put(key, value, range(self.size) if ranks is None else ranks)

    def _read(self, key: str) -> str | None:
        with suppress(StoreSilentError):
            return self._get(key)
        return None
