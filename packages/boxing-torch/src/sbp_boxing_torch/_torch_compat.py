"""What this package uses of torch.distributed below its documented functions, all in one place.

The documented functions need a process-wide default group and take no deadline for one call, so
process groups and stores are used directly. Tried with torch 2.13.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from sbp_core.boxing.processes import CountingStore


def prefixed(prefix: str, store: CountingStore) -> CountingStore:
    """Return a view of the store in which every key begins with `prefix`."""
    return cast(CountingStore, cast(Any, dist).PrefixStore(prefix, store))


def store_at(url: str, rank: int, size: int, timeout: timedelta) -> CountingStore:
    """Return the store that the processes reach at `url`.

    Raises:
        RuntimeError, ValueError, OSError: it cannot be reached, or the URL cannot be meant.
    """
    store, _, _ = next(rendezvous(url, rank, size, timeout=timeout))
    return cast(CountingStore, store)


def gloo_group(store: CountingStore, index: int, size: int, timeout: timedelta) -> Any:
    """Connect a `ProcessGroupGloo`; raises `RuntimeError` if a rank is not reached in time."""
    return cast(Any, dist.ProcessGroupGloo)(store, index, size, timeout)


def nccl_group(store: CountingStore, index: int, size: int, timeout: timedelta) -> Any:
    """Make a `ProcessGroupNCCL`; it connects at its first use."""
    nccl = cast(Any, dist.ProcessGroupNCCL)
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, index, size, options)


def all_gather_parts(
    group: Any, received: torch.Tensor, part: torch.Tensor, timeout: timedelta
) -> dist.Work:
    """Copy `part` of rank i into chunk i of `received` of all ranks; all parts of one size."""
    options = cast(Any, distributed_c10d).AllgatherOptions()
    options.timeout = timeout
    return cast(dist.Work, group._allgather_base(received, part, options))


def reduce_scatter_parts(
    group: Any, part: torch.Tensor, values: torch.Tensor, operation: Any, timeout: timedelta
) -> dist.Work:
    """Reduce chunk i of `values` over all ranks into `part` of rank i; all parts of one size."""
    options = cast(Any, distributed_c10d).ReduceScatterOptions()
    options.reduceOp = operation
    options.timeout = timeout
    return cast(dist.Work, group._reduce_scatter_base(part, values, options))
