"""Keep the control store's entries in a key-value store, such as torch.distributed's `TCPStore`.

By these entries the ranks of a run tell each other about failures (`control_store`). Such a store
answers within microseconds, or at once with an error if its host has ended; but if its host is
stopped, a call waits without limit. So a separate thread queries it (`StoreClient`), and other
threads wait for at most a second:

    callers   get("failure") -> queue -> the thread -> store.get(...)   (may hang here for ever)
              wait <= 1 s: answer, StoreSilentError (late), StoreLostError (error, from then on)

Rank 0 often hosts the store. It ends that store when it closes its backend, and hosts another for
the next backend, at the same address. A fast rank may still find the old store there:

    rank 0   deregisters ... ends the store               hosts another, counts its opening
    rank 1   reads that, closes, connects: to the old one ... connects again

So every rank counts in the store how often it has opened a backend there (`count_opening`). A rank
that finds its own count above zero has been in this store before. `connect_current_store` waits
until rank 0 has come back to it (if the program or torchrun keeps the store) or until the
connection breaks.
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

#: Seconds for an answer while an earlier request is not answered.
_IMPATIENT_S = 0.01

#: Seconds between two checks whether rank 0 has come back to a store.
_PAUSE_S = 0.01


class KeyValueStore(Protocol):
    """The part of a key-value store that is used; raises `RuntimeError` if it is lost."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the present one is as expected; "" if there should be none."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until it exists."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys exist, without waiting."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a value, if there is one."""


class StoreClient:
    """Queries a store on behalf of any thread; after the first error the store counts as lost."""

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
        """Return the result of a request, which the client's thread executes.

        Raises:
            StoreSilentError: the store does not answer for now.
            StoreLostError: the store is permanently unreachable.
        """
        if self._closed:
            raise StoreSilentError("the control store is closed")
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
        """Release the store, and end the thread, before this returns.

        If the store does not answer, the thread is abandoned. Safe to call twice.
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
                # Without its traceback, whose frames hold the store: the caller may keep the error
                # for long.
                answer.set_exception(error.with_traceback(None))
            self._unanswered_since = None
            # Nothing is kept alive while the next request is awaited.
            del entry, answer, request


class KeyValueControlStore(ControlStore):
    """Entries in a store, which any rank may read at any time.

    Args:
        store: A part of it that has no other writers.
        rank: The rank that reads and writes.
        size: Number of ranks.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._client = StoreClient(store)

    def close(self) -> None:
        """Release the store; no method may be called afterwards.

        Rank 0 waits a moment for the others to close theirs: it may host the store, and torch would
        print complaints on the standard error of ranks that query a closed store.
        """
        self.say("close")
        if self.rank == 0 and self.all_deregistered():
            self.wait_for(lambda: self.is_lost() or self.all_announced("close"), _LIMIT_S)
        self._client.close()

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        if key in FIRST_STAYS:  # even if another rank writes at the same time
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
    """A store with counters, like torch.distributed's; raises `RuntimeError` if it is lost."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return it."""


StoreT = TypeVar("StoreT", bound=CountingStore)


def count_opening(store: CountingStore, name: str, rank: int, amount: int = 1) -> int:
    """Count that a rank opens a backend in a store; return how often it has, this time included.

    Args:
        store: The store of all ranks.
        name: The name of the kind of backend.
        rank: The rank that opens the backend.
        amount: The increment; 0 only reads the count.
    """
    return store.add(f"{name}/opened/{rank}", amount)


def connect_current_store(
    connect: Callable[[], StoreT], name: str, rank: int, limit_s: float
) -> StoreT:
    """Connect to the store of this run, and not to one of an earlier run that is about to end.

    Args:
        connect: Connects this process; waits for the host of the store by itself.
        name: The name of the kind of backend, as in `count_opening`.
        rank: This rank.
        limit_s: Seconds to wait for rank 0; after that the store is used as it is.

    Raises:
        RuntimeError, ValueError, OSError: raised by `connect`.
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
            # It was the old store, which has just ended while this process was connected, or about
            # to be. Rank 0 may be the host; if it cannot connect, waiting does not help.
            if (rank == 0 and not is_connected) or time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_S)
