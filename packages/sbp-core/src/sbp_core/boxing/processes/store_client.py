"""The control store in a key-value store that all ranks reach, such as torch.distributed's.

Such a store answers within microseconds, or at once with an error if its host has ended; but if its
host is stopped, a call waits without limit. So a thread of its own asks it (`StoreClient`), and
nobody else waits for longer than a second:

    callers   get("failure") -> queue -> the thread -> store.get(...)   (may hang here for ever)
              wait <= 1 s: answer, StoreSilentError (late), StoreLostError (error, from then on)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from sbp_core.boxing.processes.control_store import (
    FIRST_STAYS,
    ControlStore,
    StoreLostError,
    StoreSilentError,
)

#: Seconds that the store may take for an answer.
_LIMIT_S = 1.0

#: Seconds that it gets while an earlier request is not answered.
_IMPATIENT_S = 0.01


class KeyValueStore(Protocol):
    """The part of a key-value store that is used; raises `RuntimeError` if it is lost."""

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


#: What the thread does with the store.
Request = Callable[[KeyValueStore], Any]


class StoreClient:
    """Asks a store, for any thread; after the first error the store counts as lost.

    Raises (all methods):
        StoreSilentError: the store does not answer for now.
        StoreLostError: the store cannot be reached any more.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[Any], Request] | None]
        self._requests = queue.SimpleQueue()
        self._closed = False
        self._lost: str | None = None
        self._unanswered_since: float | None = None
        # A daemon: it may be inside a call of the store when the process ends. It alone holds the
        # store, so that the end of the thread is that of the connection.
        self._thread = threading.Thread(
            target=self._answer, args=(store,), name="sbp-store-client", daemon=True
        )
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda store: store.set(key, value))

    def set_first(self, key: str, value: str) -> None:
        """Write a value unless there is one, whoever else does so at the same time."""
        self._ask(lambda store: store.compare_set(key, "", value))

    def get(self, key: str) -> str | None:
        """Read a value, or None if there is none."""
        value: str | None = self._ask(
            lambda store: store.get(key).decode() if store.check([key]) else None
        )
        return value

    def has_all(self, keys: Sequence[str]) -> bool:
        """Say whether there is a value for each key."""
        return bool(self._ask(lambda store: store.check(keys)))

    def delete(self, key: str) -> None:
        """Drop a value."""
        self._ask(lambda store: store.delete_key(key))

    def close(self) -> None:
        """Let go of the store, and end the thread; both are over when this returns.

        Unless the store does not answer: the thread is left to wait for it then. Safe to call
        twice.
        """
        self._closed = True
        self._requests.put(None)
        self._thread.join(_LIMIT_S if self._unanswered_since is None else _IMPATIENT_S)

    def _ask(self, request: Request) -> Any:
        if self._closed:
            raise StoreSilentError("nobody asks the store any more: the control store is closed")
        if self._lost is not None:
            raise StoreLostError(self._lost)
        answer: Future[Any] = Future()
        late = self._unanswered_since is not None
        self._requests.put((answer, request))
        try:
            return answer.result(_IMPATIENT_S if late else _LIMIT_S)
        except TimeoutError:
            self._unanswered_since = self._unanswered_since or time.monotonic()
            silent_s = time.monotonic() - self._unanswered_since + _LIMIT_S
            raise StoreSilentError(f"the store has not answered for {silent_s:.0f} s") from None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self._lost = f"the process that hosts the store cannot be reached: {reason}"
            raise StoreLostError(self._lost) from error

    def _answer(self, store: KeyValueStore) -> None:
        while (entry := self._requests.get()) is not None:
            answer, request = entry
            try:
                answer.set_result(request(store))
            except Exception as error:
                # Without the frames that it passed: they hold the store, and whoever asked may keep
                # the error for long.
                answer.set_exception(error.with_traceback(None))
            self._unanswered_since = None
            # Nothing is kept alive while the next request is awaited.
            del entry, answer, request


class KeyValueControlStore(ControlStore):
    """Entries in a store, which any rank may read at any time.

    Args:
        store: A part of it that nobody else writes to.
        rank: The rank that looks.
        size: Number of ranks.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._client = StoreClient(store)

    def close(self) -> None:
        """Let go of the store; nothing may be asked any more.

        Rank 0 waits a moment for the others to close theirs: it may host the store, and torch would
        complain on the standard error of whoever asks a store that is gone.
        """
        self._try_put(f"close/{self.rank}", "1")
        if self.rank == 0 and self.all_deregistered():
            keys = [f"close/{rank}" for rank in range(self.size)]
            self.wait_for(lambda: self.is_lost() or self._try_has_all(keys), _LIMIT_S)
        self._client.close()

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        write = self._client.set_first if key in FIRST_STAYS else self._client.set
        write(key, value)

    def _get(self, key: str) -> str | None:
        return self._client.get(key)

    def _delete(self, key: str) -> None:
        self._client.delete(key)

    def _has_all(self, keys: Iterable[str]) -> bool:
        return self._client.has_all(list(keys))
