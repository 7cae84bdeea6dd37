"""Collectives and messages on flat tensors in one process group of torch.distributed.

It handles the transports (gloo, NCCL), their ways of waiting and of failing; `communicator` decides
which data is moved.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sbp_boxing_torch._torch_compat import (
    all_gather_parts,
    gloo_group,
    nccl_group,
    reduce_scatter_parts,
)
from sbp_core.boxing import TrafficCounter
from sbp_core.processes import CountingStore

#: Timeout of a transport. Our own deadline fires long before: its error names the missing ranks,
#: and its time starts after this rank's own computation. (NCCL's watchdog would end the process.)
_ENDLESS = timedelta(days=7)

#: Tags of messages are 0 .. NUM_TAGS - 1.
NUM_TAGS = 2**31 - 1

#: Tag of no message, for the receive that breaks a gloo group.
_NO_TAG = NUM_TAGS

#: Bytes of a result up to which an all-gather over gloo sends copies of a part, in one call.
_REPEATED_BYTES = 2**18

#: Seconds of constant polling of GPU work, and the pause between two polls afterwards.
_EAGER_S, _POLL_S = 1e-3, 1e-4

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

#: Dtypes that gloo or NCCL cannot reduce, or reduce differently: torch adds bools as `or`.
_IRREDUCIBLE = frozenset({torch.bool, torch.int16})


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return contiguous values of shape (elements,) as uint8 of shape (bytes,), without a copy."""
    # A single element counts as contiguous for any stride; its bytes need stride 1.
    return values.as_strided(values.shape, (1,)).view(torch.uint8)


def reducible(dtype: torch.dtype) -> bool:
    """Return whether the transports can reduce a dtype; other dtypes are reduced locally."""
    return dtype not in _IRREDUCIBLE and not dtype.is_complex


def _delta(seconds: float) -> timedelta:
    """Return a time of whole milliseconds, at least one: for torch, 0 means no limit."""
    return timedelta(milliseconds=max(1, math.ceil(seconds * 1000)))


class TorchGroup(ABC):
    """A set of connected ranks; `peer` and list positions are indices into `ranks`.

    Each method that starts work returns at once, with the torch `Work` to wait for. Tensors are
    shape (elements,), contiguous, on the group's device, and must live until the work is complete.
    Waiting for work that cannot complete raises `RuntimeError`. `traffic` counts the bytes that
    collectives send to other ranks.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, process_group: Any) -> None:
        self.ranks = ranks
        self.traffic = TrafficCounter(len(ranks), index)
        self._index = index
        self._group = process_group

    def all_reduce(self, values: torch.Tensor, reduction: str) -> dist.Work:
        """Reduce `values` in place over all ranks."""
        self.traffic.all_reduce(values.numel(), values.element_size())
        work: dist.Work = self._group.allreduce([values], _OPERATIONS[reduction], _ENDLESS)
        return work

    def reduce_scatter(self, part: torch.Tensor, values: torch.Tensor, reduction: str) -> dist.Work:
        """Reduce consecutive chunks of `values` over all ranks, chunk i into `part` of rank i.

        All chunks are of one size.
        """
        self.traffic.even_exchange(values.nbytes)
        return reduce_scatter_parts(self._group, part, values, _OPERATIONS[reduction], _ENDLESS)

    def all_gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> Sequence[dist.Work]:
        """Copy `part` of rank i into consecutive chunk i of `received` of all other ranks.

        The rank's own chunk may be written, too, with its own part.

        Args:
            received: Buffer for the parts of all ranks.
            part: The part of this rank.
            sizes: Number of elements of each part, in order.
        """
        num_ranks = len(self.ranks)
        sent = part.repeat(num_ranks)
        return [self.exchange(received, sent, sizes, [part.numel()] * num_ranks)]

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> dist.Work:
        """Send consecutive chunks of `sent` to the ranks in order, and receive their chunks.

        Empty lists of sizes mean chunks of one size.
        """
        item_bytes = sent.element_size()
        if sent_sizes:
            self.traffic.exchange(sent_sizes, item_bytes)
        else:
            self.traffic.even_exchange(sent.nbytes)
        sizes = ([item_bytes * size for size in of] for of in (received_sizes, sent_sizes))
        work: dist.Work = self._group.alltoall_base(
            as_bytes(received), as_bytes(sent), *sizes, _ENDLESS
        )
        return work

    def send(self, values: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Send a message; `tag` in [0, NUM_TAGS)."""
        work: dist.Work = self._group.send([values], peer, tag)
        return work

    def receive(self, values: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Receive a message into `values`."""
        work: dist.Work = self._group.recv([values], peer, tag)
        return work

    @abstractmethod
    def wait(self, work: dist.Work, limit_s: float) -> bool:
        """Wait for a collective; return False if it still runs after `limit_s` seconds."""

    @abstractmethod
    def wait_message(self, work: dist.Work, limit_s: float) -> bool:
        """Wait for a message; return False after a timeout, which may break the group."""

    @abstractmethod
    def abort(self) -> None:
        """Make all work in this group fail, here and on the other ranks."""


class TorchGlooGroup(TorchGroup):
    """A group over gloo, for tensors on CPUs."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        store: CountingStore,
        limit_s: float,
        host: str = "",
    ) -> None:
        super().__init__(ranks, index, gloo_group(store, index, len(ranks), _delta(limit_s), host))

    def all_gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> Sequence[dist.Work]:
        """See `TorchGroup.all_gather`."""
        num_ranks = len(self.ranks)
        if num_ranks > 2 and sum(sizes) * received.element_size() <= _REPEATED_BYTES:
            return super().all_gather(received, part, sizes)
        # gloo's own all-gather copies everything once more. Here, in turn k, each rank sends its
        # part to the k-th rank after it, without a copy.
        chunks, turns = torch.split(received, list(sizes)), []
        for turn in range(1, num_ranks):
            target, source = (self._index + turn) % num_ranks, (self._index - turn) % num_ranks
            sizes_in = [size if peer == source else 0 for peer, size in enumerate(sizes)]
            sizes_out = [part.numel() if peer == target else 0 for peer in range(num_ranks)]
            turns.append(self.exchange(chunks[source], part, sizes_in, sizes_out))
        return turns

    def wait(self, work: dist.Work, limit_s: float) -> bool:
        """See `TorchGroup.wait`."""
        try:
            work.wait(_delta(limit_s))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it has ended: raises its error, or returns if it was just in time
        return True

    def wait_message(self, work: dist.Work, limit_s: float) -> bool:
        """See `TorchGroup.wait_message`."""
        end = time.monotonic() + limit_s
        try:
            work.wait(_delta(limit_s))
        except RuntimeError:
            if time.monotonic() >= end:
                return False
            raise
        return True

    def abort(self) -> None:
        """See `TorchGroup.abort`."""
        # gloo cannot abort a call. But a receive that times out closes all connections of its
        # group, and every call that waits on them fails, here and on the other ranks.
        peer = (self._index + 1) % len(self.ranks)
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1)], peer, _NO_TAG).wait(_delta(0.001))


class TorchNcclGroup(TorchGroup):
    """A group over NCCL, for tensors on GPUs. The host waits until the GPU is done.

    Messages between two ranks arrive in the order of sending: NCCL has no tags.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, store: CountingStore) -> None:
        super().__init__(ranks, index, nccl_group(store, index, len(ranks), _ENDLESS))

    def all_gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> Sequence[dist.Work]:
        """See `TorchGroup.all_gather`."""
        if len(set(sizes)) > 1:
            return super().all_gather(received, part, sizes)
        self.traffic.all_gather(part.nbytes)
        return [all_gather_parts(self._group, as_bytes(received), as_bytes(part), _ENDLESS)]

    def wait(self, work: dist.Work, limit_s: float) -> bool:
        """See `TorchGroup.wait`."""
        start = time.monotonic()
        while not work.is_completed():
            waited_s = time.monotonic() - start
            if waited_s >= limit_s:
                return False
            time.sleep(0.0 if waited_s < _EAGER_S else _POLL_S)
        work.wait()
        return True

    def wait_message(self, work: dist.Work, limit_s: float) -> bool:
        """See `TorchGroup.wait_message`."""
        return self.wait(work, limit_s)

    def abort(self) -> None:
        """See `TorchGroup.abort`."""
        self._group.abort()


def connect(
    transport: str,
    ranks: tuple[int, ...],
    rank: int,
    store: CountingStore,
    limit_s: float,
    host: str = "",
) -> TorchGroup:
    """Connect the ranks of a group, all of which call this at the same time.

    Args:
        transport: `gloo` or `nccl`.
        ranks: The ranks of the group, in order.
        rank: This rank.
        store: A store for this group alone.
        limit_s: Seconds to wait for the other ranks.
        host: Address that gloo listens on; empty to let gloo choose.

    Raises:
        RuntimeError: a rank could not be reached.
    """
    if transport == "nccl":
        return TorchNcclGroup(ranks, ranks.index(rank), store)
    return TorchGlooGroup(ranks, ranks.index(rank), store, limit_s, host)
