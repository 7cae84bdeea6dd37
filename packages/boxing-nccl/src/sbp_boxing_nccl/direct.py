"""Collectives made of messages between every two ranks, in chunks that overlap.

    all-reduce of ranks 0, 1:       rank 0                       rank 1
      "parts"                       sends b, chunk by chunk      sends a, chunk by chunk
      reduce                        a0 + a1, as chunks come      b0 + b1, as chunks come
      "results"                     sends the sums of a          sends the sums of b

Each collective is a *schedule*: a generator that starts messages, yields requests of MPI one after
the other, and is resumed when the last one is over. So whoever waits may give up at any request,
and sees between them that data moves. Chunks keep what is being reduced in the processor's cache;
on shared memory they are faster than MPI's own collectives, and the order of summation is that of
the ranks, whatever their number and the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sbp_boxing_nccl.reduce import reduce_into
from sbp_boxing_nccl.wire import memory
from sbp_core.sbp import split_bounds

#: Requests of MPI, each yielded when nothing else can be done until it is over.
Schedule = Iterator[Any]

#: Bytes of a chunk: at least, and at most.
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**19

#: Bytes up to which data is one chunk: starting a message takes longer than what overlap saves.
#: Source: a virtual machine of 2 cores, Open MPI 5.0.
_WHOLE_BYTES = 2**20

#: Chunks that other data is cut into at least, if they are not too small then.
_NUM_CHUNKS = 4

#: Chunks between two ranks that are under way at a time.
_WINDOW = 4

#: Bytes that all chunks which come to one rank may take at a time.
_SCRATCH_BYTES = 2**24

#: Tags: of what every rank sends, and of the results that an all-reduce sends back.
_PARTS, _RESULTS = 0, 1


class Direct:
    """The collectives of the ranks of one communicator, one at a time.

    Tensors are shape (elements,), contiguous, on the CPU, of one dtype.

    Args:
        comm: The communicator; messages on it are only ours.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        self._mpi = mpi
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        # Everybody starts with another peer, so that not all send to one.
        self._peers = [(self._rank + turn) % self._size for turn in range(1, self._size)]
        self._kept: dict[tuple[torch.dtype, int, int], list[list[tuple[torch.Tensor, Any]]]] = {}
        self._kept_bytes = 0

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Schedule:
        """Send `sent[i]` to rank i and receive `received[i]` from it, but for this rank itself."""
        if self._is_whole((*received, *sent)):
            rooms = {peer: memory(received[peer], self._mpi) for peer in self._peers}
            messages = {peer: memory(sent[peer], self._mpi) for peer in self._peers}
            coming = self._receive_all(rooms, _PARTS)
            yield from [*coming, *self._send_all(messages, _PARTS)]
            return
        outgoing = {peer: self._memory(sent[peer]) for peer in self._peers}
        incoming = {peer: self._memory(received[peer]) for peer in self._peers}
        window: deque[list[Any]] = deque()
        for turn in range(max(map(len, [*outgoing.values(), *incoming.values()]), default=0)):
            arrivals = self._receive(incoming, turn, _PARTS)
            window.append([*arrivals, *self._send(outgoing, turn, _PARTS)])
            if len(window) > _WINDOW:
                yield from window.popleft()
        for requests in window:
            yield from requests

    def reduce_scatter(
        self, result: torch.Tensor, parts: Sequence[torch.Tensor], reduction: str
    ) -> Schedule:
        """Reduce `parts[i]` over all ranks into `result` of rank i, in the order of the ranks.

        Args:
            result: May be the memory of this rank's part.
            parts: One a rank, equal on all ranks in size.
            reduction: `sum`, `max` or `min`.
        """
        if self._is_whole(parts):
            return self._reduce_at_once(result, parts, reduction)
        return self._reduce(result, parts, reduction, {})

    def all_reduce(self, result: torch.Tensor, values: torch.Tensor, reduction: str) -> Schedule:
        """Reduce `values` over all ranks into `result`, in the order of the ranks.

        Args:
            result: May be the memory of `values`.
            values: Equal on all ranks in size.
            reduction: `sum`, `max` or `min`.
        """
        bounds = split_bounds(values.numel(), self._size)
        if self._fits_whole(bounds[0][1] * values.element_size()):
            return self._all_reduce_at_once(result, values, reduction, bounds)
        parts = [values[start:stop] for start, stop in bounds]
        totals = {rank: result[start:stop] for rank, (start, stop) in enumerate(bounds)}
        return self._reduce(totals.pop(self._rank), parts, reduction, totals)

    def swap_and_reduce(
        self, result: torch.Tensor, values: torch.Tensor, reduction: str
    ) -> Schedule:
        """Run `all_reduce` between two ranks by one message each way: for small data."""
        (peer,) = self._peers
        is_apart = result.data_ptr() != values.data_ptr()
        if is_apart:
            received, place = result, memory(result, self._mpi)
        else:
            ((*_, (received, place)),) = self._places(values.dtype, values.numel(), 1)
        arrivals = self._receive_all({peer: place}, _PARTS)
        yield from [*arrivals, *self._send_all({peer: memory(values, self._mpi)}, _PARTS)]
        addends = [received, values] if self._rank else [values, received]
        reduce_into(result, addends, reduction)

    def _all_reduce_at_once(
        self,
        result: torch.Tensor,
        values: torch.Tensor,
        reduction: str,
        bounds: Sequence[tuple[int, int]],
    ) -> Schedule:
        """Run `all_reduce` with one message for each part of the values, and each result."""
        size = values.element_size()
        given, made = memory(values, self._mpi), memory(result, self._mpi)
        at = [slice(size * start, size * stop) for start, stop in bounds]
        own, mine = slice(*bounds[self._rank]), at[self._rank]
        total = result[own]
        ((*places,),) = self._places(values.dtype, own.stop - own.start, 1)
        arrivals = self._receive_all({peer: places[peer][1] for peer in self._peers}, _PARTS)
        departures = self._send_all({peer: given[at[peer]] for peer in self._peers}, _PARTS)
        returning = {peer: made[at[peer]] for peer in self._peers}
        is_apart = result.data_ptr() != values.data_ptr()
        results = self._receive_all(returning, _RESULTS) if is_apart else []
        yield from arrivals
        addends = [place for place, _ in places]
        addends[self._rank] = values[own]
        reduce_into(total, addends, reduction)
        at_last = self._send_all(dict.fromkeys(self._peers, made[mine]), _RESULTS)
        # Only what was sent may be overwritten: the result may lie where the values are.
        yield from departures
        yield from results or self._receive_all(returning, _RESULTS)
        yield from at_last

    def _reduce_at_once(
        self, result: torch.Tensor, parts: Sequence[torch.Tensor], reduction: str
    ) -> Schedule:
        """Run `reduce_scatter` with one message for each part."""
        own = parts[self._rank]
        departures = {peer: memory(parts[peer], self._mpi) for peer in self._peers}
        addends = [own]
        arrivals: list[Any] = []
        if own.numel():
            ((*places,),) = self._places(own.dtype, own.numel(), 1)
            arrivals = self._receive_all({peer: places[peer][1] for peer in self._peers}, _PARTS)
            addends = [place for place, _ in places]
            addends[self._rank] = own
        leaving = self._send_all(departures, _PARTS)
        yield from arrivals
        if own.numel():
            reduce_into(result, addends, reduction)
        yield from leaving

    def _reduce(
        self,
        result: torch.Tensor,
        parts: Sequence[torch.Tensor],
        reduction: str,
        totals: Mapping[int, torch.Tensor],
    ) -> Schedule:
        """Run `reduce_scatter`; also send the result to all, and theirs into `totals`, if given."""
        own, length = parts[self._rank], self._chunk(result)
        outgoing = {peer: self._memory(parts[peer]) for peer in self._peers}
        returning = {peer: self._memory(values) for peer, values in totals.items()}
        results = self._memory(result)
        turns = max(len(results), *map(len, outgoing.values()))
        places = self._places(result.dtype, length, min(len(results), _WINDOW))
        under_way: deque[tuple[list[Any], list[Any]]] = deque()
        at_last: list[Any] = []
        for turn in range(turns):
            for ahead in range(turn + len(under_way), min(turns, turn + _WINDOW)):
                arrivals: list[Any] = []
                if ahead < len(results):
                    arrivals = self._receive_parts(places[ahead % _WINDOW], len(results[ahead]))
                under_way.append((arrivals, self._send(outgoing, ahead, _PARTS)))
            arrivals, departures = under_way.popleft()
            yield from arrivals
            if turn < len(results):
                chunk = slice(turn * length, (turn + 1) * length)
                total = result[chunk]
                addends = [place[: total.numel()] for place, _ in places[turn % _WINDOW]]
                addends[self._rank] = own[chunk]
                reduce_into(total, addends, reduction)
                at_last += self._send(dict.fromkeys(returning, results), turn, _RESULTS)
            # Only what was sent may be overwritten: the result may lie where the values are.
            yield from departures
            at_last += self._receive(returning, turn, _RESULTS)
        yield from at_last

    def _places(
        self, dtype: torch.dtype, length: int, count: int
    ) -> list[list[tuple[torch.Tensor, Any]]]:
        """Return places, and their memory, for `count` chunks of `length` elements from each rank.

        They are kept for the next collectives, which often have the same: new memory is slow.
        """
        key = dtype, length, count
        kept = self._kept.get(key)
        if kept is None:
            scratch = torch.empty(count, self._size, length, dtype=dtype)
            self._kept_bytes += scratch.numel() * scratch.element_size()
            if self._kept_bytes > _SCRATCH_BYTES:
                self._kept.clear()
                self._kept_bytes = scratch.numel() * scratch.element_size()
            kept = [[(place, memory(place, self._mpi)) for place in row] for row in scratch]
            self._kept[key] = kept
        return kept

    def _receive_parts(
        self, places: Sequence[tuple[torch.Tensor, Any]], size_bytes: int
    ) -> list[Any]:
        """Start to receive from all what is to be added to a chunk of this rank."""
        chunks = {peer: [places[peer][1][:size_bytes]] for peer in self._peers}
        return self._receive(chunks, 0, _PARTS)

    def _send_all(self, messages: Mapping[int, Any], tag: int) -> list[Any]:
        """Start to send each rank its message, if it has bytes."""
        send, byte = self._comm.Isend, self._mpi.BYTE
        return [send([given, byte], peer, tag) for peer, given in messages.items() if len(given)]

    def _receive_all(self, messages: Mapping[int, Any], tag: int) -> list[Any]:
        """Start to receive each rank's message, if it has bytes."""
        receive, byte = self._comm.Irecv, self._mpi.BYTE
        return [receive([room, byte], peer, tag) for peer, room in messages.items() if len(room)]

    def _send(self, chunks: Mapping[int, Sequence[Any]], turn: int, tag: int) -> list[Any]:
        """Start to send one chunk to each rank that is to have so many."""
        return [
            self._comm.Isend([given[turn], self._mpi.BYTE], peer, tag)
            for peer, given in chunks.items()
            if turn < len(given)
        ]

    def _receive(self, chunks: Mapping[int, Sequence[Any]], turn: int, tag: int) -> list[Any]:
        """Start to receive one chunk from each rank that sends so many."""
        return [
            self._comm.Irecv([given[turn], self._mpi.BYTE], peer, tag)
            for peer, given in chunks.items()
            if turn < len(given)
        ]

    def _fits_whole(self, size_bytes: int) -> bool:
        """Say whether a message of some bytes is one chunk; equal on all ranks."""
        return size_bytes <= min(_WHOLE_BYTES, _SCRATCH_BYTES // self._size)

    def _is_whole(self, messages: Sequence[torch.Tensor]) -> bool:
        """Say whether each of some messages, of one dtype, is one chunk."""
        return self._fits_whole(max(map(torch.Tensor.numel, messages)) * messages[0].element_size())

    def _chunk(self, values: torch.Tensor) -> int:
        """Return how many elements a chunk of a tensor has; equal on all ranks for equal sizes."""
        size_bytes, item_bytes = values.numel() * values.element_size(), values.element_size()
        if self._fits_whole(size_bytes):
            return values.numel()
        most = min(_MOST_BYTES, _SCRATCH_BYTES // (_WINDOW * self._size))
        chunk_bytes: int = max(_LEAST_BYTES, min(most, size_bytes // _NUM_CHUNKS))
        return min(values.numel(), chunk_bytes // item_bytes)

    def _memory(self, values: torch.Tensor) -> list[Any]:
        """Return the chunks of a tensor."""
        whole, size_bytes = memory(values, self._mpi), self._chunk(values) * values.element_size()
        return [whole[at : at + size_bytes] for at in range(0, len(whole), size_bytes or 1)]
