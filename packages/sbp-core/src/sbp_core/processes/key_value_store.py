"""The control store in a key-value store that all ranks reach, such as torch.distributed's.

Such a store answers within microseconds, or at once with an error if its host has ended; but if its
host is stopped, a call waits without limit. So a thread of its own asks it (`StoreClient`), and
nobody else waits for longer than a second:

    callers   get("failure") -> queue -> the thread -> store.get(...)   (may hang here for ever)
              wait <= 1 s: answer, StoreSilentError (late), StoreLostError (error, from then on)

Rank 0 often hosts the store. It ends that store when it closes its backend, and hosts another for
the next backend, at the same address. A rank that is quick finds the old one still there:

    rank 0   deregisters ... ends the store               hosts another, counts its opening
    rank 1   reads that, closes, connects: to the old one ... connects again

So every rank counts in the store how often it has opened a backend there (`count_opening`). A rank
that finds its own count above zero has been in this store before. `connect_current_store` waits
until rank 0 has come back to it (which it does where the program or torchrun keeps the store) or
until the connection breaks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sbp_core.errors import BoxingError
from sbp_core.processes.control_store import (
    FIRST_STAYS,
    ControlStore,
    StoreLostError,
    StoreSilentError,
)

#: Seconds that the store may take for an answer.
_LIMIT_S = 1.0

#: Seconds that it gets while an earlier request is not answered.
_IMPATIENT_S = 0.01

#: Seconds between two looks whether rank 0 has come back to a store.
_PAUSE_S = 0.01


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


class StoreClient:
    """Asks a store, for any thread; after the first error the store counts as lost."""

    def __init__(self, store: KeyValueStore) -> None:
        self._requests: queue.SimpleQueue[
            tuple[Future[Any], Callable[[KeyValueStore], Any]] | None
        ] = queue.SimpleQueue()
        self._closed = False
        self._lost: str | None = None
        self._unanswered_since: float | None = None
        self._thread = threading.Thread(
            target=self._answer, args=(store,), name="sbp-store-client", daemon=True
        )
        self._thread.start()

    def ask(self, request: Callable[[KeyValueStore], Any]) -> Any:
        """Return what a request returns, which the thread makes of the store.

        Raises:
            StoreSilentError: the store does not answer for now.
            StoreLostError: the store cannot be reached any more.
        """
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

    def close(self) -> None:
        """Let go of the store, and end the thread; both are over when this returns.

        Unless the store does not answer: the thread is left to wait for it then. Safe to call
        twice.
        """
        self._closed = True
        self._requests.put(None)
        self._thread.join(_LIMIT_S if self._unanswered_since is None else _IMPATIENT_S)

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
        self.say("close")
        if self.rank == 0 and self.all_deregistered():
            self.wait_for(lambda: self.is_lost() or self.all_announced("close"), _LIMIT_S)
        self._client.close()

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        if key in FIRST_STAYS:  # whoever else writes at the same time
            self._client.ask(lambda store: store.compare_set(key, "", value))
        else:
            self._client.ask(lambda store: store.set(key, value))

    def _get(self, key: str) -> str | None:
        value: str | None = self._client.ask(
            lambda store: store.get(key).decode() if store.check([key]) else None
        )
        return value

    def _delete(self, key: str) -> None:
        self._client.ask(lambda store: store.delete_key(key))

    def _has_all(self, keys: Iterable[str]) -> bool:
        return bool(self._client.ask(lambda store: store.check(list(keys))))


class CountingStore(KeyValueStore, Protocol):
    """A store that also counts, as torch.distributed's do; raises `RuntimeError` if it is lost."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return it."""


StoreT = TypeVar("StoreT", bound=CountingStore)


def count_opening(store: CountingStore, name: str, rank: int, amount: int = 1) -> int:
    """Count that a rank opens a backend in a store; return how often it has, this time included.

    Args:
        store: Of all ranks.
        name: Of the kind of backend.
        rank: Of the one that opens it.
        amount: How often it does now; 0 only looks.
    """
    return store.add(f"{name}/opened/{rank}", amount)


def connect_current_store(
    connect: Callable[[], StoreT], name: str, rank: int, limit_s: float
) -> StoreT:
    """Connect to the store of this run, and not to one of an earlier run that is about to end.

    Args:
        connect: Connects this process; waits for the host of the store by itself.
        name: Of the kind of backend, as in `count_opening`.
        rank: This rank.
        limit_s: Seconds to wait for rank 0; after that the store is taken as it is.

    Raises:
        RuntimeError, ValueError, OSError: what `connect` raises.
    """
    end = time.monotonic() + limit_s
    while True:
        is_connected = False
        try:
            store = connect()
            is_connected = True
            num_before = count_opening(store, name, rank, 0)
            while rank and 0 < num_before >= count_opening(store, name, 0, 0):
                if time.monotonic() >= end:
                    break
                time.sleep(_PAUSE_S)
            return store
        except BoxingError:
            raise  # waiting has become hopeless
        except RuntimeError:
            # It was the old one, and has just ended: this process was connected, or about to be.
            # Rank 0 may be the host; where it cannot connect, waiting does not help.
            if (rank == 0 and not is_connected) or time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_S)
