"""The notes of the ranks, with what connecting and messages need beside those of the core's board.

They travel by MPI, or lie in a store of torch.distributed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from sbp_boxing_nccl.board import MpiBoard
from sbp_core.boxing.processes.board import Board, BoardLostError, BoardSilentError

#: Seconds that a store may take for an answer.
_LIMIT_S = 1.0

#: Seconds that it gets while an earlier question is not answered.
_IMPATIENT_S = 0.01


class NoteBoard(Board):
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


class StoreNoteBoard(NoteBoard):
    """Notes in a store of torch.distributed, which any rank may read at any time.

    The store is asked by a thread of its own: a call waits without limit if the process that hosts
    the store is stopped.

    Args:
        store: A part of it that nobody else writes to.
        rank: The rank that looks.
        size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._lost: str | None = None
        self._unanswered: Future[Any] | None = None
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._questions = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="sbp-nccl-store", daemon=True).start()

    def close(self) -> None:
        """See `Board.close`."""
        self._questions.put(None)

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        # An empty value counts as none for `compare_set`, which keeps the first.
        write = self._store.set if key != "failure" else self._set_first
        self._ask(lambda: write(key, value))

    def _get(self, key: str) -> str | None:
        text: str | None = self._ask(
            lambda: self._store.get(key).decode() if self._store.check([key]) else None
        )
        return text

    def _has_all(self, keys: Iterable[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def _forget(self, key: str) -> None:
        try:
            self._ask(lambda: self._store.delete_key(key))
        except BoardSilentError:  # seen as a failure by whoever looks next
            return

    def _set_first(self, key: str, value: str) -> None:
        self._store.compare_set(key, "", value)

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._lost is not None:
            raise BoardLostError(self._lost)
        answer: Future[Any] = Future()
        late = self._unanswered is not None and not self._unanswered.done()
        self._questions.put((answer, question))
        try:
            return answer.result(_IMPATIENT_S if late else _LIMIT_S)
        except TimeoutError:
            self._unanswered = answer
            raise BoardSilentError("the store of the ranks does not answer") from None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self._lost = f"the store of the ranks cannot be reached: {reason}"
            raise BoardLostError(self._lost) from error

    def _answer(self) -> None:
        while (entry := self._questions.get()) is not None:
            answer, question = entry
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            # Nothing is kept alive while the next question is awaited.
            del entry, answer, question
