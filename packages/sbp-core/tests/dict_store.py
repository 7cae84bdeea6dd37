"""A control store whose entries are a dict that the ranks of a test share; ways to break it."""

from __future__ import annotations

from collections.abc import Iterable

from sbp_core.processes.control_store import (
    FIRST_STAYS,
    ControlStore,
    StoreLostError,
    StoreSilentError,
)
from sbp_core.processes.membership import Member


class DictControlStore(ControlStore):
    """Entries in a dict; `trouble` is what asking for one raises."""

    def __init__(self, entries: dict[str, str], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.entries = entries
        self.trouble: StoreSilentError | None = None

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        self._check()
        if key in FIRST_STAYS:
            self.entries.setdefault(key, value)
        else:
            self.entries[key] = value

    def _get(self, key: str) -> str | None:
        self._check()
        return self.entries.get(key)

    def _delete(self, key: str) -> None:
        self._check()
        self.entries.pop(key, None)

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble


def stores_of(size: int) -> list[DictControlStore]:
    """Return the control stores of the ranks of one run."""
    entries: dict[str, str] = {}
    return [DictControlStore(entries, rank, size) for rank in range(size)]


def lost() -> StoreLostError:
    """Return the trouble of a store whose host has ended."""
    return StoreLostError("the store cannot be reached")


def elsewhere(rank: int) -> Member:
    """Return a process on another host."""
    return Member(rank=rank, host="far", pid_namespace="other", pid=1, started=1)
