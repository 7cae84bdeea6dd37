"""One MPI communicator: collectives and messages on flat tensors.

Knows MPI's calls and how to wait for them with a deadline, not steps: `mpi_communicator` says what
is moved. Large collectives are made of messages (`direct_collectives`).
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

#: Looks at a request between two looks at the clock.
_LOOKS = 64

#: Seconds without any progress after which a waiting rank lets others have its core between looks,
#: and after which it pauses.
_ALONE_S, SPIN_S = 1e-4, 1e-3

#: Length of a pause, as a part of the time without progress, and at most in seconds.
_PAUSE_SHARE, _LONGEST_PAUSE_S = 0.03, 1e-3

#: Seconds between two calls of `check` while work is under way.
_CHECK_S = 0.02

#: Bytes below which an all-reduce gathers the values of all ranks, and an all-gather of parts of
#: several sizes is MPI's own.
_SMALL_BYTES = 2**16

#: Bytes of a result up to which an all-gather or all-to-all of parts of one size is MPI's own.
#: Source: a virtual machine of 2 cores, Open MPI 5.0; larger are as fast as messages, and seen to
#: move.
_NATIVE_BYTES = 2**25

#: Bytes up to which the two ranks of an all-reduce send each other all they have. Source: a virtual
#: machine of 2 cores, Open MPI 5.0; for more, each reducing a half is faster.
_SWAPPED_BYTES = 2**19

#: Bytes of the parts of a message, and how many there are at most.
_PART_BYTES, _MOST_PARTS = 2**19, 64

#: Lets another thread or process run on this core, if one wants to.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class MpiWork:
    """Something that MPI was asked to do, and the tensors that it does it with.

    Used by one thread at a time.

    Args:
        request: The request to wait for; or, of a schedule, all of them in turn.
        tensors: What must live until the work is over.
    """

    def __init__(self, *, request: Any | Schedule, tensors: tuple[torch.Tensor, ...]) -> None:
        # Not by isinstance(), which takes longer than to look at the request.
        self._schedule: Schedule = request if hasattr(request, "__next__") else iter((request,))
        self._request: Any = None
        self.tensors = tensors
        self.num_done = 0
        self.is_over = False
        self._error: Exception | None = None

    def look(self, times: int = 1, *, yields: bool = True) -> bool:
        """Let MPI move what it can, some times; say whether all is over.

        Raises what the schedule raises, and mpi4py's `Exception`.

        Args:
            times: How often, at most.
            yields: Whether to let others have the core in between.
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
        """Look once, for somebody who does not wait for it: whoever looks next gets the error."""
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
        """Wait; False if it is still under way after `limit_s` seconds.

        Looks again and again instead of letting MPI wait, which knows no deadline. MPI moves data
        only while it is called: as long as there is progress, this rank keeps looking. If there is
        none, somebody is late: it lets others have the core, and soon pauses.

        Args:
            limit_s: Seconds to wait for others.
            check: Called now and then; raises if there is no hope.
            meanwhile: Called often: moves on what else is under way. Other ranks may wait for that
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
    """Return how many seconds to pause after some without progress."""
    return min(_PAUSE_SHARE * idle_s, _LONGEST_PAUSE_S) if idle_s > SPIN_S else 0.0


class MpiGroup:
    """A set of ranks that are connected; `peer` and list positions count within `ranks`.

    Each method returns at once; messages have been started then, a collective starts when its work
    is first looked at. Tensors are contiguous, on the CPU, of any shape. Raises mpi4py's
    `Exception` (a `RuntimeError`), there or when the work is waited for.

    Args:
        ranks: In the order of the communicator.
        comm: The communicator, used by nobody else.
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
        """Reduce consecutive chunk i, of `sizes[i]`, over all ranks into `result` of rank i."""
        parts = chunks(sent, sizes, self._mpi)
        self.traffic.exchange(list(map(len, parts)))
        start = sent.storage_offset() + sum(sizes[: self._index])
        own = sent.as_strided(result.shape, result.stride(), start)
        schedule = self._direct.reduce_scatter(result, own, parts, reduction)
        return MpiWork(request=schedule, tensors=(result, sent))

    def all_gather(
        self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]
    ) -> MpiWork:
        """Copy `part` of rank i into consecutive chunk i, of `sizes[i]`, of `received` of others.

        Whether a rank's own chunk is filled is left open: the caller has it.
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
            received: For what comes, consecutive chunk i from rank i.
            sent: What each rank gets, or consecutive chunks for them.
            gathers: Whether each rank gets all of `sent`.
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
        """Send consecutive chunk i of `sent` to rank i, and receive theirs; some may be empty.

        What this rank sends to itself is copied.
        """
        parts = chunks(sent, sent_sizes, self._mpi)
        self.traffic.exchange(list(map(len, parts)))
        schedule = self._direct.exchange(chunks(received, received_sizes, self._mpi), parts)
        return MpiWork(request=schedule, tensors=(received, sent))

    def send(self, values: torch.Tensor, peer: int, tag: int) -> MpiWork:
        """Send a message; it is over when the peer receives it, so that MPI keeps no copy."""
        send, byte = self._comm.Issend, self._mpi.BYTE
        requests = [send([part, byte], peer, tag) for part in self._parts(values)]
        return MpiWork(request=iter(requests), tensors=(values,))

    def receive(self, values: torch.Tensor, peer: int, tag: int) -> MpiWork:
        """Receive a message into `values`."""
        receive, byte = self._comm.Irecv, self._mpi.BYTE
        requests = [receive([part, byte], peer, tag) for part in self._parts(values)]
        return MpiWork(request=iter(requests), tensors=(values,))

    def abandon(self, work: MpiWork) -> None:
        """Keep the tensors of work that was given up for as long as MPI may write to them."""
        # An attribute lives with its communicator, and one with abandoned work is never freed.
        keyval = self._mpi.Comm.Create_keyval()
        self._comm.Set_attr(keyval, work)

    def free(self) -> None:
        """Release the communicator; nothing may be under way."""
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
        """Run an all-reduce that is over after one round, and adds in the order of the ranks."""
        everything = values.new_empty((len(self.ranks), *values.shape))
        yield from self._gather(everything, values, [values.numel()] * len(self.ranks))
        reduce_into(result, everything.unbind(), reduction)

    def _parts(self, values: torch.Tensor) -> list[Any]:
        """Cut a message into parts that follow each other, as memory; both ends cut alike.

        So both see while it moves that it moves; and shared memory takes several at a time.
        """
        whole = memory(values, self._mpi)
        size = max(_PART_BYTES, -(-len(whole) // _MOST_PARTS))
        return [whole[start : start + size] for start in range(0, max(1, len(whole)), size)]
