"""One process group of torch.distributed: collectives and messages on flat tensors.

Knows transports (gloo, NCCL) and their ways of waiting and breaking, not steps: `communicator` says
what is moved.
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

#: The time that a transport has: our own deadline speaks long before, because it knows who is
#: missing, and counts from the end of what this rank computes meanwhile. (NCCL's watchdog would end
#: the process.)
_ENDLESS = timedelta(days=7)

#: Tags of messages are 0 .. NUM_TAGS - 1.
NUM_TAGS = 2**31 - 1

#: Tag that no message has, of the receive by which a gloo group is broken.
_NO_TAG = NUM_TAGS

#: Bytes of a whole up to which an all-gather over gloo sends copies of a part, in one call.
_REPEATED_BYTES = 2**18

#: Seconds in which work on a GPU is looked at all the time, and pause between two looks after them.
_EAGER_S, _POLL_S = 1e-3, 1e-4

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

#: Dtypes that gloo or NCCL cannot reduce, or as torch does not: it adds truth values as `or`.
_IRREDUCIBLE = frozenset({torch.bool, torch.int16})


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return contiguous values of shape (elements,) as uint8 of shape (bytes,), without a copy."""
    # A single element counts as contiguous whatever its stride is; its bytes want stride 1.
    return values.as_strided(values.shape, (1,)).view(torch.uint8)


def reducible(dtype: torch.dtype) -> bool:
    """Say whether the transports reduce a dtype; any other is moved, and reduced here."""
    return dtype not in _IRREDUCIBLE and not dtype.is_complex


def _delta(seconds: float) -> timedelta:
    """Return a time of whole milliseconds, at least one: torch takes 0 for no limit."""
    return timedelta(milliseconds=max(1, math.ceil(seconds * 1000)))


class TorchGroup(ABC):
    """A set of ranks that are connected; `peer` and list positions count within `ranks`.

    Each method that starts something returns at once, with the torch `Work` to wait for; its
    tensors are shape (elements,), contiguous, on the group's device, and must live until it is
    over. Work that cannot complete raises `RuntimeError` when it is waited for. `traffic` counts
    the bytes that collectives are given for other ranks.
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

        The chunk of the rank itself may be written too, with its part.

        Args:
            received: To be filled.
            part: Of this rank.
            sizes: Elements of the parts, in order.
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
        """Send consecutive chunks of `sent` to ranks in order, and receive theirs likewise.

        No sizes mean chunks of one size.
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
        """Wait for a collective; False if it still runs after `limit_s` seconds."""

    @abstractmethod
    def wait_message(self, work: dist.Work, limit_s: float) -> bool:
        """Wait for a message; False if the time is over, which may break the group."""

    @abstractmethod
    def abort(self) -> None:
        """Make everything that runs in this group fail, here and on the other ranks."""


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
        # gloo's own copies everything once more. In turn k, everybody sends its part to the k-th
        # rank after it, straight from and to where it has to be.
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
            work.wait()  # it is over: raises its own error, or returns if it just came in time
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
        # gloo cannot abort a call, but a receive that runs out of time closes all connections of
        # its group, and every call that waits on them fails, here and at the other ends.
        peer = (self._index + 1) % len(self.ranks)
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1)], peer, _NO_TAG).wait(_delta(0.001))


class TorchNcclGroup(TorchGroup):
    """A group over NCCL, for tensors on GPUs. The host waits until the GPU is done.

    Messages between two ranks arrive in the order in which they were sent: NCCL has no tags.
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
        ranks: Of the group, in order.
        rank: This one.
        store: Of this group alone.
        limit_s: Seconds to wait for the others.
        host: Address that gloo listens on; empty for the one that it finds.

    Raises:
        RuntimeError: a rank could not be reached.
    """
    if transport == "nccl":
        return TorchNcclGroup(ranks, ranks.index(rank), store)
    return TorchGlooGroup(ranks, ranks.index(rank), store, limit_s, host)
