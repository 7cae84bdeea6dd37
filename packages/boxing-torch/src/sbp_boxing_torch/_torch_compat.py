"""What this package uses of torch.distributed below its documented functions, all in one place.

The documented functions need a process-wide default group and take no deadline for one call, so
process groups and stores are used directly. Tried with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


class Store(Protocol):
    """The part of a torch.distributed store that is used here; raises `RuntimeError` if lost."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until it is there."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Say whether all keys are there, without waiting."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return it."""


def prefixed(prefix: str, store: Store) -> Store:
    """Return a view of the store in which every key begins with `prefix`."""
    return cast(Store, cast(Any, dist).PrefixStore(prefix, store))


def meet_at(url: str, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store that the processes reach at `url`.

    Raises:
        RuntimeError, ValueError, OSError: it cannot be reached, or the URL cannot be meant.
    """
    store, _, _ = next(rendezvous(url, rank, size, timeout=timeout))
    return cast(Store, store)


def gloo_group(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    """Connect a `ProcessGroupGloo`; raises `RuntimeError` if a rank is not reached in time."""
    return cast(Any, dist.ProcessGroupGloo)(store, index, size, timeout)


def nccl_group(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    """Make a `ProcessGroupNCCL`; it connects at its first use."""
    nccl = cast(Any, dist.ProcessGroupNCCL)
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, index, size, options)
