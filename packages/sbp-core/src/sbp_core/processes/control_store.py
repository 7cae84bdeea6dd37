"""The control store: short entries by which the ranks of a run know of each other.

Tensors never pass here, and nothing is written on the fast path of a step: only where something
takes long, goes wrong or ends.

| key | is written by | says |
|---|---|---|
| `member/RANK` | `register` | which process the rank is |
| `join/GROUP/RANK` | `say` | the rank is ready to connect a group |
| `waiting/GROUP/RANK` | `say` | the number of the group's latest call that it came to |
| `location/RANK` | `say` | the step in which it is, or was last, in words that follow its name |
| `heartbeat/RANK` | `say` | a number, another one each time |
| `failure` | `announce_failure` | why the run failed; the first text stays |
| `acknowledged/RANK` | `say` | the rank has read that |
| `survivor/RANK` | `say` | the rank is left when the run has failed |
| `survivors` | `agree_on_survivors` | all that are left; the first list stays |
| `deregistered/RANK`, `deregistered/any` | `deregister` | the rank (or any) needs no other |
| `transport/...` | `publish` | whatever a backend wants its ranks to know |

How entries travel is a subclass's: `store_client` keeps them in a key-value store, boxing-nccl
sends them as messages of MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from sbp_core.processes.membership import Member, MemberState, state_of
from sbp_core.processes.waiting import wait_until

#: Characters of a failure that are announced: over MPI a short message leaves at once, whatever its
#: receiver does; a long one waits for it.
_LONGEST_TEXT = 2000

#: Of these, what was written first stays; of others, what was written last.
FIRST_STAYS = ("failure", "survivors")


class StoreSilentError(RuntimeError):
    """The control store does not answer for now."""


class StoreLostError(StoreSilentError):
    """The control store cannot be reached any more; says why."""


class ControlStore(ABC):
    """The entries of one run, as one rank sees them.

    No method waits for another rank, but for `wait_for`. Once the store is lost, `failure` says so,
    and every other method acts as if nobody had written anything: who asks about the others must
    not fail for want of an answer.

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

    # How entries travel: what a subclass brings.

    @abstractmethod
    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        """Write an entry for some ranks; of equal keys the last counts, of `FIRST_STAYS` the first.

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
        """Forget an entry that was read, so that many of them take no memory.

        Raises:
            StoreSilentError: it cannot be deleted.
        """

    def _has_all(self, keys: Iterable[str]) -> bool:
        """Say whether there is an entry for each key."""
        return all(self._get(key) is not None for key in keys)

    # What each rank says of itself; see the module for the keys. A store that does not answer
    # leaves that without effect: whoever looks next sees a failure in it.

    def say(self, key: str, value: str = "1", ranks: Iterable[int] | None = None) -> None:
        """Tell some ranks, or all, something about this one: write its entry `key/RANK`."""
        self._write(f"{key}/{self.rank}", value, ranks)

    def announced(self, key: str, rank: int) -> str | None:
        """Return what a rank has said of itself, or None if it has not."""
        return self._read(f"{key}/{rank}")

    def announcing(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Return those of some ranks that have said something."""
        return [rank for rank in ranks if self.announced(key, rank) is not None]

    def all_announced(self, key: str) -> bool:
        """Say whether every rank has said something."""
        with suppress(StoreSilentError):
            return self._has_all(f"{key}/{rank}" for rank in range(self.size))
        return False

    # Who takes part.

    def register(self, member: Member) -> None:
        """Tell all ranks which process this one is."""
        self.say("member", member.to_json())

    def members(self) -> dict[int, Member]:
        """Return the processes of the ranks that have registered, by rank."""
        for rank in range(self.size):
            if rank not in self._members and (entry := self.announced("member", rank)):
                self._members[rank] = Member.from_json(entry)
        return dict(self._members)

    def standing_still(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some ranks whose processes are seen to have ended, or to be stopped.

        By those members alone that have been read: the store may be silent.
        """
        me, still = self._members.get(self.rank), (MemberState.STOPPED, MemberState.ENDED)
        known = [] if me is None else [rank for rank in ranks if rank in self._members]
        return [rank for rank in known if me and state_of(self._members[rank], me) in still]

    def not_joined(self, group: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are not ready to connect a group."""
        return self._absent(ranks, lambda rank: self._get(f"join/{group}/{rank}") is not None)

    # Where they are.

    def not_waiting(self, group: str, number: int, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not come to a call of a group, as far as they reported."""
        others = [rank for rank in ranks if rank != self.rank]
        return self._absent(
            others, lambda rank: int(self._get(f"waiting/{group}/{rank}") or -1) >= number
        )

    # How it ends.

    def announce_failure(self, text: str) -> None:
        """Tell all ranks why the run failed; the first text stays."""
        if self._read("failure") is None:
            self._write("failure", text[:_LONGEST_TEXT])

    def failure(self) -> str | None:
        """Return why the run failed, as the first rank that knew said, or None if it did not."""
        try:
            return self._get("failure")
        except StoreLostError as error:
            return str(error)
        except StoreSilentError:
            return None

    def is_lost(self, *, if_silent: bool = False) -> bool:
        """Say whether entries cannot be read any more; `if_silent` is the answer if they may be."""
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
        """Return which ranks are left, as the first one said that was asked; None if it is lost."""
        self._write("survivors", proposed)
        return self._read("survivors")

    def deregister(self) -> None:
        """Tell all ranks that this one needs nobody any more: it may end now."""
        self.say("deregistered")
        self._write("deregistered/any")

    def deregistered(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that need nobody any more."""
        # Asked often, and the answer is nobody until the run ends: one entry says so.
        if self._read("deregistered/any") is None:
            return []
        return self.announcing("deregistered", ranks)

    def all_deregistered(self) -> bool:
        """Say whether nobody needs this rank any more, or nobody can be reached."""
        try:
            return self._has_all(f"deregistered/{rank}" for rank in range(self.size))
        except StoreSilentError as error:
            # The rank that hosts the store goes last: without it, all others have gone.
            return isinstance(error, StoreLostError)

    def close(self) -> None:  # noqa: B027 (nothing to let go of is the common case)
        """Let go of what carries the entries; nothing may be asked any more."""

    # What a backend adds.

    def publish(self, key: str, text: str, ranks: Iterable[int]) -> None:
        """Write an entry of the backend's own for some ranks."""
        self._write(f"transport/{key}", text, ranks)

    def lookup(self, key: str) -> str | None:
        """Return an entry that was published, or None if it has not come."""
        return self._read(f"transport/{key}")

    def take(self, key: str) -> str | None:
        """Return an entry that was published for this rank alone, and delete it."""
        if (text := self.lookup(key)) is not None:
            with suppress(StoreSilentError):
                self._delete(f"transport/{key}")
        return text

    def wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Look until `done()` says yes or `limit_s` seconds are over; return the answer."""
        first_s, longest_s = self.pauses_s
        return wait_until(done, limit_s, first_pause_s=first_s, longest_pause_s=longest_s)

    def _absent(self, ranks: Iterable[int], has_come: Callable[[int], bool]) -> list[int]:
        """Return the ranks that have not come; if the store is silent, those that cannot have."""
        ranks = list(ranks)
        with suppress(StoreSilentError):
            return [rank for rank in ranks if not has_come(rank)]
        # Better to accuse those whose processes stand still than everybody else.
        return self.standing_still(ranks) or [rank for rank in ranks if rank != self.rank]

    def _write(self, key: str, value: str = "1", ranks: Iterable[int] | None = None) -> None:
        with suppress(StoreSilentError):
            self._put(key, value, range(self.size) if ranks is None else ranks)

    def _read(self, key: str) -> str | None:
        with suppress(StoreSilentError):
            return self._get(key)
        return None
