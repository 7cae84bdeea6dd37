"""The notes that ranks leave for each other: who they are, where they wait, what broke.

A note is left when something takes long or goes wrong, never on the fast path of a step. How notes
travel is the transport's. Holds no tensors and imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

from sbp_core.boxing.processes.call import wait_until
from sbp_core.boxing.processes.membership import Member, MemberState, state_of

#: Characters of a failure that are told: short notes leave at once, whatever the receiver does.
_LONGEST_TEXT = 2000


class StoreSilentError(RuntimeError):
    """Whoever keeps the notes does not answer for now."""


class StoreLostError(StoreSilentError):
    """Notes cannot be exchanged any more; says why."""


class ControlStore(ABC):
    """The notes of one run, as one rank sees them.

    No method waits for another rank, but for `wait_for`. When notes cannot be exchanged any more,
    `failure` says so, and every other method acts as if nobody had left a note.

    Args:
        rank: The rank that looks.
        size: Number of ranks.
    """

    #: Pauses between two looks, in seconds: the first, and the longest.
    pauses_s: ClassVar[tuple[float, float]] = (5e-4, 0.02)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._members: dict[int, Member] = {}

    # How notes travel.

    @abstractmethod
    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        """Leave a note for some ranks; of equal keys the last counts, but of `failure` the first.

        Raises:
            BoardSilentError: it cannot be left.
        """

    @abstractmethod
    def _get(self, key: str) -> str | None:
        """Return a note, or None if there is none; does not wait for it.

        Raises:
            BoardSilentError: notes cannot be read.
        """

    def _has_all(self, keys: Iterable[str]) -> bool:
        """Say whether there is a note for each key."""
        return all(self._get(key) is not None for key in keys)

    # Who takes part.

    def register(self, member: Member) -> None:
        """Tell all ranks which process this one is."""
        self._leave_note(f"member/{member.rank}", member.to_json())

    def members(self) -> dict[int, Member]:
        """Return the processes of the ranks that have enlisted, by rank."""
        for rank in range(self.size):
            if rank not in self._members and (note := self._note(f"member/{rank}")):
                self._members[rank] = Member.from_json(note)
        return dict(self._members)

    def all_enlisted(self) -> bool:
        """Say whether every rank has enlisted."""
        return self._are_there(f"member/{rank}" for rank in range(self.size))

    def join(self, group: str, ranks: Iterable[int] | None = None) -> None:
        """Tell the ranks of a group that this one is ready to connect it."""
        self._leave_note(f"join/{group}/{self.rank}", "1", ranks)

    def not_joined(self, group: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are not ready to connect a group."""
        return self._absent(ranks, lambda rank: self._get(f"join/{group}/{rank}") is not None)

    # Where they are.

    def wait_at(self, group: str, number: int, ranks: Iterable[int] | None = None) -> None:
        """Tell the ranks of a group that this one waits at a call, counted from the first."""
        self._leave_note(f"wait/{group}/{self.rank}", str(number), ranks)

    def not_waiting(self, group: str, number: int, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not come to a call of a group, as far as they told."""
        others = [rank for rank in ranks if rank != self.rank]
        return self._absent(
            others, lambda rank: int(self._get(f"wait/{group}/{rank}") or -1) >= number
        )

    def come_to(self, place: str) -> None:
        """Tell all ranks where this one is, in words that follow its name."""
        self._leave_note(f"at/{self.rank}", place)

    def last_seen(self, rank: int) -> str | None:
        """Return where a rank was when it last told."""
        return self._note(f"at/{rank}")

    def beat(self, number: int, ranks: Iterable[int]) -> None:
        """Tell ranks that this one still runs; the number is another each time."""
        self._leave_note(f"beat/{self.rank}", str(number), ranks)

    def last_beat(self, rank: int) -> str | None:
        """Return the last number that a rank told by `beat`."""
        return self._note(f"beat/{rank}")

    # How it ends.

    def announce(self, text: str) -> None:
        """Tell all ranks why the run failed; the first text stays."""
        if self._note("failure") is None:
            self._leave_note("failure", text[:_LONGEST_TEXT])

    def failure(self) -> str | None:
        """Return why the run failed, as the first rank that knew said, or None if it did not."""
        try:
            return self._get("failure")
        except StoreLostError as error:
            return str(error)
        except StoreSilentError:
            return None

    def is_lost(self) -> bool:
        """Say whether notes cannot be read any more."""
        try:
            self._get("failure")
        except StoreSilentError as error:
            return isinstance(error, StoreLostError)
        return False

    def hear(self) -> None:
        """Tell all ranks that this one knows why the run failed."""
        self._leave_note(f"heard/{self.rank}", "1")

    def not_heard(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that may not know why the run failed, and have not left either."""
        return [
            rank
            for rank in ranks
            if rank != self.rank
            and self._note(f"heard/{rank}") is None
            and self._note(f"leave/{rank}") is None
        ]

    def leave(self) -> None:
        """Tell all ranks that this one needs nobody any more."""
        self._leave_note(f"leave/{self.rank}", "1")
        self._leave_note("leave/any", "1")

    def left(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have left."""
        if self._note("leave/any") is None:
            return []
        return [rank for rank in ranks if self._note(f"leave/{rank}") is not None]

    def all_left(self) -> bool:
        """Say whether nobody needs this rank any more, or nobody can be reached."""
        try:
            return self._has_all(f"leave/{rank}" for rank in range(self.size))
        except StoreSilentError as error:
            # Whoever keeps the notes leaves last.
            return isinstance(error, StoreLostError)

    def wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Look until `done()` says yes or `limit_s` seconds are over; return the answer."""
        first_pause_s, longest_pause_s = self.pauses_s
        return wait_until(
            done, limit_s, first_pause_s=first_pause_s, longest_pause_s=longest_pause_s
        )

    def _absent(self, ranks: Iterable[int], has_come: Callable[[int], bool]) -> list[int]:
        """Return the ranks that have not come; if nobody says, those that cannot have come."""
        ranks = list(ranks)
        try:
            return [rank for rank in ranks if not has_come(rank)]
        except StoreSilentError:
            here = self._members.get(self.rank)
            hindered = [
                rank
                for rank in ranks
                if here is not None
                and rank in self._members
                and state_of(self._members[rank], here) in (MemberState.STOPPED, MemberState.ENDED)
            ]
            return hindered or [rank for rank in ranks if rank != self.rank]

    def close(self) -> None:  # noqa: B027 (nothing to let go of is the common case)
        """Let go of what carries the notes; nothing may be asked any more."""

    def _leave_note(self, key: str, value: str, ranks: Iterable[int] | None = None) -> None:
        try:
            self._put(key, value, range(self.size) if ranks is None else ranks)
        except StoreSilentError:  # seen as a failure by whoever looks next
            return

    def _note(self, key: str) -> str | None:
        try:
            return self._get(key)
        except StoreSilentError:
            return None

    def _are_there(self, keys: Iterable[str]) -> bool:
        try:
            return self._has_all(keys)
        except StoreSilentError:
            return False
