"""A board whose notes are a dict that the ranks of a test share, and ways to break it."""

from __future__ import annotations

from collections.abc import Iterable

from sbp_core.boxing.processes.control_store import ControlStore, StoreLostError, StoreSilentError
from sbp_core.boxing.processes.membership import Member


class DictBoard(ControlStore):
    """Notes in a dict; `trouble` is what asking for one raises."""

    def __init__(self, notes: dict[str, str], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.notes = notes
        self.trouble: StoreSilentError | None = None

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        self._check()
        if key == "failure":
            self.notes.setdefault(key, value)
        else:
            self.notes[key] = value

    def _get(self, key: str) -> str | None:
        self._check()
        return self.notes.get(key)

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble


def boards_of(size: int) -> list[DictBoard]:
    """Return the boards of the ranks of one run."""
    notes: dict[str, str] = {}
    return [DictBoard(notes, rank, size) for rank in range(size)]


def lost() -> StoreLostError:
    """Return the trouble of a board whose keeper has ended."""
    return StoreLostError("the store cannot be reached")


def elsewhere(rank: int) -> Member:
    """Return a process on another host."""
    return Member(rank=rank, host="far", space="other", pid=1, started=1)
