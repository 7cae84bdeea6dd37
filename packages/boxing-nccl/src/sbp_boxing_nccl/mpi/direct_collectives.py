"""Collectives made of point-to-point messages between all pairs of ranks, in chunks that overlap.

    all-reduce of ranks 0, 1:       rank 0                       rank 1
      "parts"                       sends b, chunk by chunk      sends a, chunk by chunk
      reduce                        a0 + a1, as chunks come      b0 + b1, as chunks come
      "results"                     sends the sums of a          sends the sums of b

`MpiGroup` uses them for large tensors. Each collective is a *schedule*: a generator that starts
messages, yields requests of MPI one after the other, and is resumed when the last request is
complete. So a waiting rank may give up at any request, and sees progress between them. Chunks keep
the data of a reduction in the processor's cache. On shared memory they are faster than MPI's own
collectives, and the order of summation is the order of the ranks, for any number of ranks and any
library.

Several collectives may be in flight: each has distinct tags, from its number, which all ranks count
alike, and distinct buffers for arriving data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sbp_boxing_nccl.mpi.tensors import chunks, memory, reduce_into
from sbp_core.sbp import split_bounds

#: Requests of MPI, each yielded when nothing else can be done until it is complete.
Schedule = Iterator[Any]

#: Buffer for data of one rank until it is reduced: tensor, and its memory for mpi4py.
Place = tuple[torch.Tensor, Any]

#: Kind of buffers: dtype, shape, and number of buffers for each rank.
_PlaceKind = tuple[torch.dtype, Sequence[int], int]

#: Smallest and largest size of a chunk, in bytes.
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**19

#: Bytes up to which data is one chunk: starting a message costs more than overlap saves. Source: a
#: virtual machine of 2 cores, Open MPI 5.0.
_WHOLE_BYTES = 2**20

#: Smallest number of chunks of larger data, unless the chunks would be too small.
_NUM_CHUNKS = 4

#: Number of chunks between two ranks that are in flight at a time.
_WINDOW = 4

#: Largest size of all buffers for chunks that arrive at one rank, in bytes.
_SCRATCH_BYTES = 2**24

#: Largest number of entries in the cache of `_shares`.
_KEPT_SHARES = 4096

#: Number of collectives that may be in flight between two ranks; then tags are reused. Each takes
#: two tags, of which MPI has at least 2**15.
_NUM_NUMBERS = 2**13


class DirectCollectives:
    """Collectives of the ranks of one communicator; all ranks start them in the same order.

    Tensors are contiguous, on the CPU, of one dtype and any shape; data that is only moved is
    passed as memory (module `tensors`).

    Args:
        comm: The communicator; not used for anything else.
        mpi: The module `mpi4py.MPI`.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        self._mpi = mpi
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        # Each rank starts with a different peer, so that not all send to one rank.
        self._peers = [(self._rank + turn) % self._size for turn in range(1, self._size)]
        self._number = 0
        #: Free buffers by kind.
        self._kept: dict[_PlaceKind, list[list[list[Place]]]] = {}
        self._kept_bytes = 0
        self._kept_shares: dict[int, tuple[list[int], int]] = {}

    def exchange(self, received: Sequence[Any], sent: Sequence[Any]) -> Schedule:
        """Send `sent[i]` to rank i and receive `received[i]` from it; copy the rank's own part."""
        return self._exchange(received, sent, self._next_tag())

    def _exchange(self, received: Sequence[Any], sent: Sequence[Any], tag: int) -> Schedule:
        fits = self._fits_whole(max(map(len, (*received, *sent))))
        requests: list[Any] = []
        if fits:
            requests = self._receive(self._each(received), tag)
            requests += self._send(self._each(sent), tag)
        if len(sent[self._rank]):
            received[self._rank][:] = sent[self._rank]
        if fits:
            yield from requests
            return
        outgoing = {peer: self._cut(sent[peer]) for peer in self._peers}
        incoming = {peer: self._cut(received[peer]) for peer in self._peers}
        window: deque[list[Any]] = deque()
        for turn in range(max(map(len, [*outgoing.values(), *incoming.values()]), default=0)):
            arrivals = self._receive(_chunks_of(incoming, turn), tag)
            window.append([*arrivals, *self._send(_chunks_of(outgoing, turn), tag)])
            if len(window) > _WINDOW:
                yield from window.popleft()
        for requests in window:
            yield from requests

    def reduce_scatter(
        self, result: torch.Tensor, own: torch.Tensor, sent: Sequence[Any], reduction: str
    ) -> Schedule:
        """Reduce the parts of all ranks for rank i into `result` of rank i, in rank order.

        Args:
            result: Tensor for the result; may share the memory of `own`.
            own: The part of this rank for itself, of the shape of `result`.
            sent: The memory of its part for each rank, with equal sizes on all ranks.
            reduction: `sum`, `max` or `min`.
        """
        tag = self._next_tag()
        if self._fits_whole(max(map(len, sent))):
            return self._reduce_at_once(result, own, sent, reduction, (), tag)
        return self._reduce(result.view(-1), own.view(-1), sent, reduction, (), tag)

    def all_reduce(self, result: torch.Tensor, values: torch.Tensor, reduction: str) -> Schedule:
        """Reduce `values` over all ranks into `result`, in the order of the ranks.

        Args:
            result: Tensor for the result; may share the memory of `values`.
            values: The addends of this rank; the same size on all ranks.
            reduction: `sum`, `max` or `min`.
        """
        sizes, start = self._shares(values.numel())
        given, made = chunks(values, sizes, self._mpi), chunks(result, sizes, self._mpi)
        shape = (sizes[self._rank],)
        total = own = values.as_strided(shape, (1,), values.storage_offset() + start)
        if result.data_ptr() != values.data_ptr():
            total = result.as_strided(shape, (1,), result.storage_offset() + start)
        fits = self._fits_whole(len(given[0]))
        run = self._reduce_at_once if fits else self._reduce
        return run(total, own, given, reduction, made, self._next_tag())

    def swap_and_reduce(
        self, result: torch.Tensor, values: torch.Tensor, reduction: str
    ) -> Schedule:
        """Run `all_reduce` of two ranks with one message in each direction: for small data."""
        return self._swap_and_reduce(result, values, reduction, self._next_tag())

    def _swap_and_reduce(
        self, result: torch.Tensor, values: torch.Tensor, reduction: str, tag: int
    ) -> Schedule:
        (peer,) = self._peers
        byte, kind, places = self._mpi.BYTE, (values.dtype, values.shape, 1), None
        if result.data_ptr() != values.data_ptr():
            received, place = result, memory(result, self._mpi)
        else:
            places = self._places(kind)
            received, place = places[0][peer]
        arrival = self._comm.Irecv([place, byte], peer, tag)
        departure = self._comm.Isend([memory(values, self._mpi), byte], peer, tag)
        yield arrival
        yield departure
        addends = (received, values) if self._rank else (values, received)
        reduce_into(result, addends, reduction)
        if places is not None:
            self._give_back(kind, places)

    def _reduce_at_once(
        self,
        result: torch.Tensor,
        own: torch.Tensor,
        sent: Sequence[Any],
        reduction: str,
        totals: Sequence[Any],
        tag: int,
    ) -> Schedule:
        """Run `_reduce` with one message for each part of the values, and for each result."""
        kind = own.dtype, own.shape, 1
        (places,) = kept = self._places(kind)
        arrivals = self._receive(self._each([place for _, place in places]), tag)
        departures = self._send(self._each(sent), tag)
        is_apart = bool(totals) and result.data_ptr() != own.data_ptr()
        results = self._receive(self._each(totals), tag + 1) if is_apart else []
        yield from arrivals
        reduce_into(result, self._addends(own, places), reduction)
        self._give_back(kind, kept)
        at_last: list[Any] = []
        if totals:
            at_last = self._send(self._each([totals[self._rank]] * self._size), tag + 1)
        # Wait until the values are sent: the result may overwrite them.
        yield from departures
        if totals:
            yield from results or self._receive(self._each(totals), tag + 1)
        yield from at_last

    def _reduce(
        self,
        result: torch.Tensor,
        own: torch.Tensor,
        sent: Sequence[Any],
        reduction: str,
        totals: Sequence[Any],
        tag: int,
    ) -> Schedule:
        """Run `reduce_scatter`; if `totals` is given, also gather all results into it.

        Args:
            result: See `reduce_scatter`, shape (elements,).
            own: See `reduce_scatter`, shape (elements,).
            sent: See `reduce_scatter`.
            reduction: See `reduce_scatter`.
            totals: The memory on this rank for the result of each rank.
            tag: Tag of the parts; the results have the next tag.
        """
        item_bytes = result.element_size()
        outgoing = {peer: self._cut(sent[peer], item_bytes) for peer in self._peers}
        returning = {peer: self._cut(totals[peer], item_bytes) for peer in self._peers if totals}
        results = self._cut(memory(result, self._mpi), item_bytes)
        turns = max(len(results), *map(len, outgoing.values()))
        length = len(results[0]) // item_bytes if results else 0
        kind = result.dtype, (length,), min(len(results), _WINDOW)
        places = self._places(kind)
        under_way: deque[tuple[list[Any], list[Any]]] = deque()
        at_last: list[Any] = []
        for turn in range(turns):
            for ahead in range(turn + len(under_way), min(turns, turn + _WINDOW)):
                arrivals: list[Any] = []
                if ahead < len(results):
                    size = len(results[ahead])
                    rooms = [place[:size] for _, place in places[ahead % _WINDOW]]
                    arrivals = self._receive(self._each(rooms), tag)
                under_way.append((arrivals, self._send(_chunks_of(outgoing, ahead), tag)))
            arrivals, departures = under_way.popleft()
            yield from arrivals
            if turn < len(results):
                chunk = slice(turn * length, (turn + 1) * length)
                total = result[chunk]
                here = [(place[: total.numel()], given) for place, given in places[turn % _WINDOW]]
                reduce_into(total, self._addends(own[chunk], here), reduction)
                given = _chunks_of(dict.fromkeys(returning, results), turn)
                at_last += self._send(given, tag + 1)
            # Wait until the values are sent: the result may overwrite them.
            yield from departures
            at_last += self._receive(_chunks_of(returning, turn), tag + 1)
        self._give_back(kind, places)
        yield from at_last

    def _addends(self, own: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
        """Return the addends of one part in rank order: this rank's and the received ones."""
        addends = [place for place, _ in places]
        addends[self._rank] = own
        return addends

    def _shares(self, elements: int) -> tuple[list[int], int]:
        """Return how many elements each rank reduces, and the start of this rank's share."""
        kept = self._kept_shares.get(elements)
        if kept is None:
            if len(self._kept_shares) >= _KEPT_SHARES:
                self._kept_shares.clear()
            bounds = split_bounds(elements, self._size)
            kept = [stop - start for start, stop in bounds], bounds[self._rank][0]
            self._kept_shares[elements] = kept
        return kept

    def _next_tag(self) -> int:
        """Return the tag of a new collective; the next tag is free, too."""
        self._number = (self._number + 1) % _NUM_NUMBERS
        return 2 * self._number

    def _places(self, kind: _PlaceKind) -> list[list[Place]]:
        """Return buffers of a kind for the data of each rank; they have to be given back.

        Later collectives reuse them, because new memory is slow.
        """
        free = self._kept.get(kind)
        if free:
            places = free.pop()
            self._kept_bytes -= _size_bytes(places)
            return places
        dtype, shape, count = kind
        scratch = torch.empty(count, self._size, *shape, dtype=dtype)
        return [[(place, memory(place, self._mpi)) for place in row] for row in scratch]

    def _give_back(self, kind: _PlaceKind, places: list[list[Place]]) -> None:
        """Take back buffers that receive nothing any more; not after an abandoned collective."""
        self._kept_bytes += _size_bytes(places)
        if self._kept_bytes > _SCRATCH_BYTES:
            self._kept.clear()
            self._kept_bytes = _size_bytes(places)
        self._kept.setdefault(kind, []).append(places)

    def _each(self, messages: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return pairs of each other rank and its message."""
        return [(peer, messages[peer]) for peer in self._peers]

    def _send(self, messages: Sequence[tuple[int, Any]], tag: int) -> list[Any]:
        """Start to send messages to ranks; empty messages are skipped."""
        send, byte = self._comm.Isend, self._mpi.BYTE
        return [send([message, byte], peer, tag) for peer, message in messages if len(message)]

    def _receive(self, rooms: Sequence[tuple[int, Any]], tag: int) -> list[Any]:
        """Start to receive messages of ranks; empty messages are skipped."""
        receive, byte = self._comm.Irecv, self._mpi.BYTE
        return [receive([room, byte], peer, tag) for peer, room in rooms if len(room)]

    def _fits_whole(self, size_bytes: int) -> bool:
        """Return whether a message of some bytes is one chunk; equal on all ranks."""
        return size_bytes <= min(_WHOLE_BYTES, _SCRATCH_BYTES // self._size)

    def _cut(self, message: Any, item_bytes: int = 1) -> list[Any]:
        """Return the chunks of a message, none if it is empty; sender and receiver cut alike.

        Args:
            message: Memory of the message.
            item_bytes: Size of an element; chunks are a multiple of it.
        """
        size_bytes = len(message)
        if self._fits_whole(size_bytes):
            return [message] if size_bytes else []
        most = min(_MOST_BYTES, _SCRATCH_BYTES // (_WINDOW * self._size))
        length = max(_LEAST_BYTES, min(most, size_bytes // _NUM_CHUNKS)) // item_bytes * item_bytes
        return [message[at : at + length] for at in range(0, size_bytes, length)]


def _chunks_of(messages: Mapping[int, Sequence[Any]], turn: int) -> list[tuple[int, Any]]:
    """Return pairs of a rank and chunk number `turn` of its message, if there is one."""
    return [(peer, chunks[turn]) for peer, chunks in messages.items() if turn < len(chunks)]


def _size_bytes(places: Sequence[Sequence[Place]]) -> int:
    """Return the total size of buffers, in bytes."""
    return sum(place.nbytes for row in places for place, _ in row)
