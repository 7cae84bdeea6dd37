"""A store that is asked by a thread of its own, so that nobody waits for it for ever.

A store of torch.distributed answers within microseconds, or at once with an error if its host has
ended; but if its host is stopped, a call waits without limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sbp_boxing_torch._torch_compat import Store
from sbp_core.boxing.processes.board import BoardLostError, BoardSilentError

#: Seconds that the store may take for an answer.
_LIMIT_S = 1.0

#: Seconds that it gets while an earlier question is not answered.
_IMPATIENT_S = 0.01


class Clerk:
    """Asks a store, for any thread; after the first error the store counts as lost.

    Raises (all methods):
        BoardSilentError: the store does not answer for now.
        BoardLostError: the store cannot be reached any more.
    """

    def __init__(self, store: Store) -> None:
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

    def get(self, key: str) -> str | None:
        """Read a value, or None if there is none."""
        value: str | None = self._ask(
            lambda: self._store.get(key).decode() if self._store.check([key]) else None
        )
        return value

    def has_all(self, keys: Sequence[str]) -> bool:
        """Say whether there is a value for each key."""
        return bool(self._ask(lambda: self._store.check(keys)))

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
