"""The notes of the ranks, with what connecting and messages need beside those of the core's board.

They travel by MPI, or lie in a store of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable

from sbp_boxing_nccl.board import MpiBoard
from sbp_core.boxing.processes import ControlStore, KeyValueControlStore, StoreSilentError


class NoteBoard(ControlStore):
    """A board that also carries notes of the backend's own: ids, devices, messages."""

    def share(self, key: str, text: str, ranks: Iterable[int]) -> None:
        """Leave a note for some ranks."""
        self._leave_note(f"nccl/{key}", text, ranks)

    def read(self, key: str) -> str | None:
        """Return a note, or None if it has not come."""
        return self._note(f"nccl/{key}")

    def take(self, key: str) -> str | None:
        """Return a note that was left for this rank alone, and forget it."""
        text = self.read(key)
        if text is not None:
            self._forget(f"nccl/{key}")
        return text

    def _forget(self, key: str) -> None:
        """Drop a note, so that many of them take no memory."""


class MpiNoteBoard(MpiBoard, NoteBoard):
    """Notes that are sent by MPI to whom they concern."""

    def _forget(self, key: str) -> None:
        with self._lock:
            self._notes.pop(key, None)


class StoreNoteBoard(KeyValueControlStore, NoteBoard):
    """Notes in a store of torch.distributed, which any rank may read at any time."""

    def _forget(self, key: str) -> None:
        try:
            self._clerk.delete(key)
        except StoreSilentError:  # seen as a failure by whoever looks next
            return
