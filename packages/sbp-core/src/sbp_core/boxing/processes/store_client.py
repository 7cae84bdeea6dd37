"""The notes of the ranks in a key-value store that all of them reach, such as torch.distributed's.

A store answers within microseconds, or at once with an error if its host has ended; but if its host
is stopped, a call waits without limit. So it is asked by a thread of its own (`Clerk`), and nobody
waits for it for ever. Imports no torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from sbp_core.boxing.processes.control_store import Board, BoardLostError, BoardSilentError

#: Seconds that the store may take for an answer.
_LIMIT_S = 1.0

#: Seconds that it gets while an earlier question is not answered.
_IMPATIENT_S = 0.01


class NoteStore(Protocol):
    """The part of a key-value store that carries notes; raises `RuntimeError` if lost."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the present one is as expected, which "" is where there is none."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until it is there."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Say whether all keys are there, without waiting."""

    def delete_key(self, key: str, /) -> bool:
        """Drop a value, if there is one."""


class Clerk:
    """Asks a store, for any thread; after the first error the store counts as lost.

    Raises (all methods):
        BoardSilentError: the store does not answer for now.
        BoardLostError: the store cannot be reached any more.
    """

    def __init__(self, store: NoteStore) -> None:
        self._store = store
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._questions = queue.SimpleQueue()
        self._lost: str | None = None
        self._unanswered_since: float | None = None
        # A daemon: it may be inside a call of the store when the process ends.
        self._thread = threading.Thread(target=self._answer, name="sbp-clerk", daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> None:
        """Write a value unless there is one, whoever else does so at the same time."""
        self._ask(lambda: self._store.compare_set(key, "", value))

    def get(self, key: str) -> str | None:
        """Read a value, or None if there is none."""
        value: str | None = self._ask(
            lambda: self._store.get(key).decode() if self._store.check([key]) else None
        )
        return value

    def has_all(self, keys: Sequence[str]) -> bool:
        """Say whether there is a value for each key."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def delete(self, key: str) -> None:
        """Drop a value."""
        self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """End the thread, once it has an answer to its last question."""
        self._questions.put(None)

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._lost is not None:
            raise BoardLostError(self._lost)
        answer: Future[Any] = Future()
        late = self._unanswered_since is not None
        self._questions.put((answer, question))
        try:
            return answer.result(_IMPATIENT_S if late else _LIMIT_S)
        except TimeoutError:
            self._unanswered_since = self._unanswered_since or time.monotonic()
            silent_s = time.monotonic() - self._unanswered_since + _LIMIT_S
            raise BoardSilentError(f"the store has not answered for {silent_s:.0f} s") from None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self._lost = f"the process that hosts the store cannot be reached: {reason}"
            raise BoardLostError(self._lost) from error

    def _answer(self) -> None:
        while (entry := self._questions.get()) is not None:
            answer, question = entry
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            self._unanswered_since = None
            # Nothing is kept alive while the next question is awaited.
            del entry, answer, question


class StoreBoard(Board):
    """Notes in a store, which any rank may read at any time.

    Args:
        store: A part of it that nobody else writes to.
        rank: The rank that looks.
        size: Number of ranks.
    """

    def __init__(self, store: NoteStore, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._clerk = Clerk(store)

    def close(self) -> None:
        """Let go of the store; nothing may be asked any more."""
        self._clerk.close()

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        write = self._clerk.set_first if key == "failure" else self._clerk.set
        write(key, value)

    def _get(self, key: str) -> str | None:
        return self._clerk.get(key)

    def _has_all(self, keys: Iterable[str]) -> bool:
        return self._clerk.has_all(list(keys))
