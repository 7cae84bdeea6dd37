"""Undocumented functions of torch.distributed that this package calls, all in one place.

The documented functions need a process-wide default group and accept no deadline for a single call,
so process groups and stores are used directly. Tried with torch 2.13.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sbp_core.processes import CountingStore


def prefixed(prefix: str, store: CountingStore) -> CountingStore:
    """Return a view of the store in which every key begins with `prefix`."""
    return cast(CountingStore, cast(Any, dist).PrefixStore(prefix, store))


def gloo_group(
    store: CountingStore, index: int, size: int, timeout: timedelta, host: str = ""
) -> Any:
    """Connect a `ProcessGroupGloo`; raises `RuntimeError` if a rank is not reached in time.

    It listens on the address `host`. If that is empty, it listens on the interface
    GLOO_SOCKET_IFNAME, or on the one to which the name of this host resolves.
    """
    gloo = cast(Any, dist.ProcessGroupGloo)
    if not host:
        return gloo(store, index, size, timeout)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, index, size, options)


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
