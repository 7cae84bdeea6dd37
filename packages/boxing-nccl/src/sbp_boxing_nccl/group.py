"""One MPI communicator: collectives and messages on flat tensors.

Knows MPI's calls and how to wait for them with a deadline, not steps: `communicator` says what is
moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sbp_boxing_nccl.wire import movable, operation, reducible

#: Pauses between two looks at a request, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

#: Seconds between two calls of `check` while a request is under way.
_CHECK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something that MPI was asked to do, and the tensors that it does it with."""

    request: Any
    tensors: tuple[torch.Tensor, ...]

    def wait(self, limit_s: float, check: Callable[[], None]) -> bool:
        """Wait; False if it is still under way after `limit_s` seconds.

        Looks and sleeps in turn instead of letting MPI wait: MPI would keep a core busy, and knows
        no deadline.

        Args:
            limit_s: Seconds to wait for others.
            check: Called now and then; raises if there is no hope.
        """
        end, pause, checked = time.monotonic() + limit_s, _FIRST_PAUSE_S, time.monotonic()
        while not self.request.Test():
            now = time.monotonic()
            if now >= end:
                return False
            if now - checked >= _CHECK_S:
                checked = now
                check()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
        return True


class Group:
    """A set of ranks that are connected; `peer` and list positions count within `ranks`.

    Each method starts something and returns at once. Tensors are shape (elements,), contiguous, on
    the CPU. Raises mpi4py's `Exception` (a `RuntimeError`), or `OverflowError` for more elements
    than MPI counts.

    Args:
        ranks: In the order of the communicator.
        comm: The communicator, used by nobody else.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, ranks: tuple[int, ...], comm: Any, mpi: Any) -> None:
        self.ranks = ranks
        self._comm = comm
        self._mpi = mpi

    def all_reduce(self, values: torch.Tensor, reduction: str, dtype: torch.dtype) -> Work:
        """Reduce `values`, which stand for values of `dtype`, in place over all ranks."""
        request = self._comm.Iallreduce(
            self._mpi.IN_PLACE,
            reducible(values, self._mpi),
            op=operation(reduction, dtype, self._mpi),
        )
        return Work(request=request, tensors=(values,))

    def reduce_scatter(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        sizes: Sequence[int],
        reduction: str,
        dtype: torch.dtype,
    ) -> Work:
        """Reduce consecutive chunks of `sent` over all ranks, chunk i into `received` of rank i."""
        request = self._comm.Ireduce_scatter(
            reducible(sent, self._mpi),
            reducible(received, self._mpi),
            list(sizes),
            op=operation(reduction, dtype, self._mpi),
        )
        return Work(request=request, tensors=(received, sent))

    def all_gather(self, received: torch.Tensor, part: torch.Tensor, sizes: Sequence[int]) -> Work:
        """Copy `part` of rank i into consecutive chunk i of `received` of all."""
        values, datatype = movable(received, self._mpi)
        request = self._comm.Iallgatherv(
            movable(part, self._mpi), [values, (list(sizes), starts(sizes)), datatype]
        )
        return Work(request=request, tensors=(received, part))

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Work:
        """Send consecutive chunks of `sent` to ranks in order, and receive theirs likewise."""
        values_in, datatype = movable(received, self._mpi)
        values_out, _ = movable(sent, self._mpi)
        request = self._comm.Ialltoallv(
            [values_out, (list(sent_sizes), starts(sent_sizes)), datatype],
            [values_in, (list(received_sizes), starts(received_sizes)), datatype],
        )
        return Work(request=request, tensors=(received, sent))

    def send(self, values: torch.Tensor, peer: int, tag: int) -> Work:
        """Send a message."""
        request = self._comm.Isend(movable(values, self._mpi), peer, tag)
        return Work(request=request, tensors=(values,))

    def receive(self, values: torch.Tensor, peer: int, tag: int) -> Work:
        """Receive a message into `values`."""
        request = self._comm.Irecv(movable(values, self._mpi), peer, tag)
        return Work(request=request, tensors=(values,))

    def abandon(self, work: Work) -> None:
        """Keep the tensors of work that was given up for as long as MPI may write to them."""
        # An attribute lives with its communicator, and one with abandoned work is never freed.
        keyval = self._mpi.Comm.Create_keyval()
        self._comm.Set_attr(keyval, work)

    def free(self) -> None:
        """Release the communicator; nothing may be under way."""
        self._comm.Free()


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where consecutive chunks of these sizes start."""
    return [sum(sizes[:index]) for index in range(len(sizes))]
