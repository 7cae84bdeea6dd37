"""Where the ranks of a run find each other again: the right one of two stores at one address.

Rank 0 often hosts the key-value store in which the control store lives. It ends that store when it
closes its backend, and hosts another for the next backend, at the same address. A rank that is
quick finds the old one still there:

    rank 0   deregisters ... ends the store               hosts another, counts its opening
    rank 1   reads that, closes, connects: to the old one ... connects again

So every rank counts in the store how often it has opened a backend there. A rank that finds its own
count above zero has been in this store before, and waits until rank 0 has come back to it (which it
does where the program or torchrun keeps the store) or until the connection breaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from sbp_core.boxing.processes.store_client import KeyValueStore
from sbp_core.errors import BoxingError

#: Seconds between two looks whether rank 0 has come back to a store.
_PAUSE_S = 0.01


class CountingStore(KeyValueStore, Protocol):
    """A store that also counts, as torch.distributed's do; raises `RuntimeError` if it is lost."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return it."""


StoreT = TypeVar("StoreT", bound=CountingStore)


def count_opening(store: CountingStore, name: str, rank: int) -> int:
    """Count that a rank opens a backend in a store; return how often it has, this time included.

    Args:
        store: Of all ranks.
        name: Of the kind of backend.
        rank: This rank.
    """
    return store.add(_counter(name, rank), 1)


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
            num_before = store.add(_counter(name, rank), 0)
            while rank and 0 < num_before >= store.add(_counter(name, 0), 0):
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


def _counter(name: str, rank: int) -> str:
    return f"{name}/opened/{rank}"
