"""Collectives and messages on flat tensors over one MPI communicator (a set of ranks).

It calls MPI and waits for MPI with a deadline; `mpi_communicator` decides which data is moved.
Large collectives are made of point-to-point messages (`direct_collectives`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from sbp_boxing_nccl.mpi.direct_collectives import DirectCollectives, Schedule
from sbp_boxing_nccl.mpi.tensors import chunks, memory, reduce_into
from sbp_core.boxing import TrafficCounter

#: Polls of a request between two looks at the clock.
_LOOKS = 64

#: Seconds without progress after which a waiting rank yields its core between polls, and after
#: which it sleeps between them.
_ALONE_S, SPIN_S = 1e-4, 1e-3

#: Length of a sleep as a fraction of the time without progress, and its maximum in seconds.
_PAUSE_SHARE, _LONGEST_PAUSE_S = 0.03, 1e-3

#: Seconds between two calls of `check` while waiting.
_CHECK_S = 0.02

#: Bytes below which an all-reduce gathers the values of all ranks, and an all-gather of unequal
#: parts uses MPI's collective.
_SMALL_BYTES = 2**16

#: Bytes of a result up to which an all-gather or all-to-all of equal parts uses MPI's collective.
#: Source: a virtual machine of 2 cores, Open MPI 5.0. Larger results are as fast by messages, whose
#: progress is visible.
_NATIVE_BYTES = 2**25

#: Bytes up to which the two ranks of an all-reduce send each other all values. Source: a virtual
#: machine of 2 cores, Open MPI 5.0; above, it is faster if each reduces a half.
_SWAPPED_BYTES = 2**19

#: Size of the parts of a message in bytes, and their largest number.
_PART_BYTES, _MOST_PARTS = 2**19, 64

#: Lets another ready thread or process run on this core.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class MpiWork:
    """An unfinished operation of MPI, and its tensors.

    Used by one thread at a time.

    Args:
        request: The request to wait for, or a schedule, which yields several in turn.
        tensors: Tensors to keep alive until the work is complete.
    """

    def __init__(self, *, request: Any | Schedule, tensors: tuple[torch.Tensor, ...]) -> None:
        # Not by isinstance(), which takes longer than to poll the request.
        self._schedule: Schedule = request if hasattr(request, "__next__") else iter((request,))
        self._request: Any = None
        self.tensors = tensors
        self.num_done = 0
        self.is_over = False
        self._error: Exception | None = None

    def look(self, times: int = 1, *, yields: bool = True) -> bool:
        """Poll MPI a few times, which moves data; return whether the work is complete.

        Raises the errors of the schedule, and mpi4py's `Exception`.

        Args:
            times: Largest number of polls.
            yields: Whether to yield the core in between.
        """
        if self._error is not None:
            raise self._error
        request = self._request
        for _ in range(times):
            while request is None or request.Test():
                request = self._request = next(self._schedule, None)
                if request is None:
                    self.is_over, self.tensors = True, ()
                    return True
                self.num_done += 1
            if yields:
                _yield_core()
        return False

    def progress(self) -> None:
        """Poll once without waiting; an error is kept for the next `look`."""
        if self.is_over or self._error is not None:
            return
        try:
            self.look(yields=False)
        except (RuntimeError, OverflowError) as error:
            self._error = error

    def wait(
        self,
        limit_s: float,
        check: Callable[[], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> bool:
        """Wait; return False if the work is not complete after `limit_s` seconds.

        Polls, because MPI's own wait has no deadline. MPI moves data only while it is called, so
        this rank polls without pause as long as there is progress. Without progress, another rank
        is late: then it yields the core, and soon sleeps between polls.

        Args:
            limit_s: Seconds to wait for other ranks.
            check: Called now and then; raises if waiting is hopeless.
            meanwhile: Called often: makes progress on other work, which other ranks may wait for
                first.
        """
        moved = checked = time.monotonic()
        end, num_done = moved + limit_s, self.num_done
        yields = False
        while not self.look(_LOOKS, yields=yields):
            if meanwhile is not None:
                meanwhile()
            now = time.monotonic()
            if self.num_done > num_done:
                moved, num_done = now, self.num_done
            if now >= end:
                return False
            if now - checked >= _CHECK_S:
                checked = now
                check()
            yields = now - moved > _ALONE_S
            pause_s = pause_after(now - moved)
            if pause_s:
                time.sleep(pause_s)
        return True


def pause_after(idle_s: float) -> float:
    """Return the seconds to sleep after `idle_s` seconds without progress."""
    return min(_PAUSE_SHARE * idle_s, _LONGEST_PAUSE_S) if idle_s > SPIN_S else 0.0


class MpiGroup:
    """A set of connected ranks; `peer` and list positions are indices into `ranks`.

    Each method returns at once. A message has been started then; a collective starts at the first
    `look` at its work. Tensors are contiguous, on the CPU, of any shape. Raises mpi4py's
    `Exception` (a `RuntimeError`), at the call or when waiting for the work.

    Args:
        ranks: The ranks, in the order of the communicator.
        comm: The communicator, not used by anything else.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, ranks: tuple[int, ...], comm: Any, mpi: Any) -> None:
        self.ranks = ranks
        self._comm = comm
        self._mpi = mpi
        self._direct = DirectCollectives(comm, mpi)
        self._index: int = comm.Get_rank()
        self.traffic = TrafficCounter(len(ranks), self._index)

    def all_reduce(self, result: torch.Tensor, values: torch.Tensor, reduction: str) -> MpiWork:
        """Reduce `values` over all ranks into `result`, in rank order; they may be the same."""
        size_bytes = values.nbytes
        self.traffic.all_reduce(values.numel(), values.element_size())
        if len(self.ranks) == 2 and size_bytes <= _SWAPPED_BYTES:
            schedule = self._direct.swap_and_reduce(result, values, reduction)
        elif size_bytes < _SMALL_BYTES:
            schedule = self._gather_and_reduce(result, values, reduction)
        else:
            schedule = self._direct.all_reduce(result, values, reduction)
        return MpiWork(request=schedule, tensors=(result, values))

    def reduce_scatter(
        self, result: torch.Tensor, sent: torch.Tensor, sizes: Sequence[int], reduction: str
    ) -> MpiWork:
        """Reduce consecutive chunk i (`sizes[i]` elements) over all ranks to `result` of rank i."""
        parts = chunks(sent, sizes, self._mpi)
        self.traffic.exchange(list(map(len, parts)))
        start = sent.storage_offset() + sum(sizes[: self._index])
        own = sent.as_strided(result.shape, result.stride(), start)
        schedule = self._direct.reduce_scatter(result, own, parts, reduction)
        return MpiWork(request=schedule, tensors=(result, sent))

    def all_gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> MpiWork:
        """Copy `part` of rank i into chunk i (`sizes[i]` elements) of `received` of other ranks.

        A rank's own chunk may or may not be filled.
        """
        self.traffic.all_gather(part.nbytes)
        if received.nbytes < _SMALL_BYTES:
            return MpiWork(request=self._gather(received, part, sizes), tensors=(received, part))
        places = chunks(received, sizes, self._mpi)
        parts = [memory(part, self._mpi)] * len(places)
        places[self._index] = parts[self._index] = b""
        return MpiWork(request=self._direct.exchange(places, parts), tensors=(received, part))

    def exchange_even(
        self, received: torch.Tensor, sent: torch.Tensor, *, gathers: bool
    ) -> MpiWork:
        """Run an all-gather or all-to-all of parts of one size.

        Args:
            received: Buffer for the parts, consecutive chunk i from rank i.
            sent: The part for every rank, or consecutive chunks, one for each rank.
            gathers: Whether each rank gets all of `sent` (all-gather).
        """
        mpi, num_ranks = self._mpi, len(self.ranks)
        (self.traffic.all_gather if gathers else self.traffic.even_exchange)(sent.nbytes)
        request: Any
        if received.nbytes <= _NATIVE_BYTES:
            start = self._comm.Iallgather if gathers else self._comm.Ialltoall
            request = start([memory(sent, mpi), mpi.BYTE], [memory(received, mpi), mpi.BYTE])
        else:
            sizes = [received.numel() // num_ranks] * num_ranks
            parts = [memory(sent, mpi)] * num_ranks if gathers else chunks(sent, sizes, mpi)
            request = self._direct.exchange(chunks(received, sizes, mpi), parts)
        return MpiWork(request=request, tensors=(received, sent))

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> MpiWork:
        """Send consecutive chunk i of `sent` to rank i, and receive theirs; chunks may be empty.

        The chunk of a rank for itself is copied.
        """
        parts = chunks(sent, sent_sizes, self._mpi)
        self.traffic.exchange(list(map(len, parts)))
        schedule = self._direct.exchange(chunks(received, received_sizes, self._mpi), parts)
        return MpiWork(request=schedule, tensors=(received, sent))

    def send(self, values: torch.Tensor, peer: int, tag: int) -> MpiWork:
        """Send a message; complete when the peer receives it, so that MPI keeps no copy."""
        send, byte = self._comm.Issend, self._mpi.BYTE
        requests = [send([part, byte], peer, tag) for part in self._parts(values)]
        return MpiWork(request=iter(requests), tensors=(values,))

    def receive(self, values: torch.Tensor, peer: int, tag: int) -> MpiWork:
        """Receive a message into `values`."""
        receive, byte = self._comm.Irecv, self._mpi.BYTE
        requests = [receive([part, byte], peer, tag) for part in self._parts(values)]
        return MpiWork(request=iter(requests), tensors=(values,))

    def abandon(self, work: MpiWork) -> None:
        """Keep the tensors of abandoned work alive for as long as MPI may write to them."""
        # An attribute lives as long as its communicator, which is never freed after abandoned work.
        keyval = self._mpi.Comm.Create_keyval()
        self._comm.Set_attr(keyval, work)

    def free(self) -> None:
        """Free the communicator; no work may be unfinished."""
        self._comm.Free()

    def _gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> Iterator[Any]:
        byte, size = self._mpi.BYTE, part.element_size()
        counts = [size * elements for elements in sizes]
        places = [memory(received, self._mpi), (counts, [0, *accumulate(counts[:-1])]), byte]
        yield self._comm.Iallgatherv([memory(part, self._mpi), byte], places)

    def _gather_and_reduce(
        self, result: torch.Tensor, values: torch.Tensor, reduction: str
    ) -> Iterator[Any]:
        """Run an all-reduce in one round of messages that adds in the order of the ranks."""
        everything = values.new_empty((len(self.ranks), *values.shape))
        yield from self._gather(everything, values, [values.numel()] * len(self.ranks))
        reduce_into(result, everything.unbind(), reduction)

    def _parts(self, values: torch.Tensor) -> list[Any]:
        """Cut a message into consecutive parts, as memory; sender and receiver cut alike.

        So both see progress while it moves, and shared memory moves several parts at a time.
        """
        whole = memory(values, self._mpi)
        size = max(_PART_BYTES, -(-len(whole) // _MOST_PARTS))
        return [whole[start : start + size] for start in range(0, max(1, len(whole)), size)]
