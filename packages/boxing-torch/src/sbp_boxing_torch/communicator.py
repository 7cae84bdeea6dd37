"""The ends of all steps of one rank: which pieces go where, how long to wait, what to say if not.

What is moved is `sbp_core.boxing.slices`; how is `group`; the life of connections is `connections`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sbp_boxing_torch.call import Call
from sbp_boxing_torch.connections import Connections, group_name
from sbp_boxing_torch.group import Group
from sbp_boxing_torch.parcel import num_elements, pack, unpack
from sbp_boxing_torch.wire import as_bytes, from_reducible, reducible, tag_number, to_reducible
from sbp_core.boxing.backend import Communicator
from sbp_core.boxing.execute import check_shard, combine, torch_dtype
from sbp_core.boxing.slices import Piece, collective_pieces, sent_bytes, transfer_pieces
from sbp_core.boxing.step import Step, StepKind
from sbp_core.sbp import Partial

#: Seconds after which a rank that waits in a collective leaves a note that it is there.
_PATIENCE_S = 0.2


class TorchCommunicator(Communicator):
    """One rank's ends, over the connections of its process."""

    def __init__(self, connections: Connections, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self._connections = connections
        self._device = device
        self._calls: dict[tuple[int, ...], int] = {}

    def collective(
        self, step: Step, shard: torch.Tensor, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """See `Communicator.collective`."""
        call = self._begin(step, tag, deadline_s)
        check_shard(step, self.rank, shard)
        ranks = step.group(self.rank)
        if len(ranks) == 1:
            return shard
        if step.kind is StepKind.ALL_REDUCE:
            result = self._all_reduce(call, ranks, shard)
        else:
            result = self._regroup(call, ranks, shard)
        self.sent_bytes += sent_bytes(step, self.rank)
        return result

    def send(self, step: Step, shard: torch.Tensor, *, tag: str, deadline_s: float) -> None:
        """See `Communicator.send`."""
        call = self._begin(step, tag, deadline_s)
        check_shard(step, self.rank, shard)
        outgoing: dict[int, list[Piece]] = {}
        for piece in transfer_pieces(step):
            if piece.sender == self.rank != piece.receiver:
                outgoing.setdefault(piece.receiver, []).append(piece)
        for receiver, pieces in outgoing.items():
            # A copy: the shard is the caller's to drop, and may be a view of something larger.
            values = as_bytes(pack(shard, pieces).to(self._device, copy=True))
            self._connections.post(call, receiver, values, tag_number(tag))
        self.sent_bytes += sent_bytes(step, self.rank)

    def receive(
        self, step: Step, shard: torch.Tensor | None, *, tag: str, deadline_s: float
    ) -> torch.Tensor:
        """See `Communicator.receive`."""
        call = self._begin(step, tag, deadline_s)
        mine = [piece for piece in transfer_pieces(step) if piece.receiver == self.rank]
        by_sender: dict[int, list[Piece]] = {}
        for piece in mine:
            by_sender.setdefault(piece.sender, []).append(piece)
        parcels: dict[int, torch.Tensor] = {}
        arriving: list[tuple[int, Group, dist.Work]] = []
        for sender, pieces in by_sender.items():
            if sender == self.rank:
                if shard is None:
                    raise call.failed("this rank is a sender too, and gave no shard to receive()")
                check_shard(step, self.rank, shard)
                parcels[sender] = pack(shard, pieces)
                continue
            parcels[sender] = self._empty(step, num_elements(step, pieces))
            group = self._connections.messages(sender, self.rank)
            with self._connections.guard(call):
                work = group.receive(as_bytes(parcels[sender]), sender, tag_number(tag))
            arriving.append((sender, group, work))
        for sender, group, work in arriving:
            with self._connections.guard(call):
                if not group.wait_message(work, call.left_s):
                    raise self._connections.broken(call, call.missing([sender]))
        return combine(step, self.rank, unpack(mine, parcels), device=self._device)

    def _begin(self, step: Step, tag: str, deadline_s: float) -> Call:
        call = Call.begin(step, tag, self.rank, deadline_s)
        self._connections.check_usable(call)
        return call

    def _all_reduce(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard
        entry = call.step.source[1][call.step.axis]
        assert isinstance(entry, Partial), "only partial values are reduced"
        values, reduction = to_reducible(shard.reshape(-1), entry.reduction)
        self._run(call, ranks, lambda group: group.all_reduce(values, reduction, call.left_s))
        return from_reducible(values, shard.dtype).reshape(shard.shape)

    def _regroup(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """Run an all-gather, reduce-scatter or all-to-all.

        The native collectives want parts of one size. Uneven parts are exchanged at their exact
        sizes and reduced here, in mesh order.
        """
        step, pieces = call.step, collective_pieces(call.step, ranks)
        mine = [piece for piece in pieces if piece.receiver == self.rank]
        even = len(pieces) == len(ranks) ** 2 and len({piece.size_bytes for piece in pieces}) == 1
        size = num_elements(step, pieces[:1])
        if even and step.kind is StepKind.ALL_GATHER and size == shard.numel():
            received = self._empty(step, size * len(ranks))
            parts = list(as_bytes(received).chunk(len(ranks)))
            part = as_bytes(shard.reshape(-1))
            self._run(call, ranks, lambda group: group.all_gather(parts, part, call.left_s))
            parcels = dict(zip(ranks, received.chunk(len(ranks)), strict=True))
            return combine(step, self.rank, unpack(mine, parcels), device=self._device)
        if even and step.kind is StepKind.REDUCE_SCATTER and reducible(shard.dtype):
            return self._reduce_scatter(call, ranks, shard, pieces)
        return self._exchange(call, ranks, shard, pieces)

    def _reduce_scatter(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, pieces: tuple[Piece, ...]
    ) -> torch.Tensor:
        entry = call.step.source[1][call.step.axis]
        assert isinstance(entry, Partial), "only partial values are reduced"
        reduction = entry.reduction
        mine = {piece.receiver: piece for piece in pieces if piece.sender == self.rank}
        parts = [pack(shard, [mine[rank]]) for rank in ranks]
        received = torch.empty_like(parts[0])
        self._run(
            call,
            ranks,
            lambda group: group.reduce_scatter(received, parts, reduction, call.left_s),
        )
        target = mine[self.rank].target
        return received.reshape(tuple(stop - start for start, stop in target))

    def _exchange(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, pieces: tuple[Piece, ...]
    ) -> torch.Tensor:
        step = call.step
        mine = [piece for piece in pieces if piece.receiver == self.rank]
        own = pack(shard, [piece for piece in mine if piece.sender == self.rank])
        others = [piece for piece in pieces if piece.sender != piece.receiver]
        outgoing = [
            [piece for piece in others if (piece.sender, piece.receiver) == (self.rank, rank)]
            for rank in ranks
        ]
        incoming = [
            [piece for piece in others if (piece.sender, piece.receiver) == (rank, self.rank)]
            for rank in ranks
        ]
        sizes = [num_elements(step, given) for given in incoming]
        received = self._empty(step, sum(sizes))
        if others:
            sent = torch.cat([pack(shard, given) for given in outgoing])
            bytes_in = [sum(piece.size_bytes for piece in given) for given in incoming]
            bytes_out = [sum(piece.size_bytes for piece in given) for given in outgoing]
            self._run(
                call,
                ranks,
                lambda group: group.exchange(
                    as_bytes(received), as_bytes(sent), bytes_in, bytes_out, call.left_s
                ),
            )
        parcels = dict(zip(ranks, torch.split(received, sizes), strict=True)) | {self.rank: own}
        return combine(step, self.rank, unpack(mine, parcels), device=self._device)

    def _run(self, call: Call, ranks: tuple[int, ...], start: Callable[[Group], dist.Work]) -> None:
        """Start a collective in the group of `ranks` and wait for it.

        The ranks that wait long leave a note, so that each can say at its deadline who did not.
        """
        number = self._calls[ranks] = self._calls.get(ranks, -1) + 1
        group = self._connections.group(call, ranks)
        board, name = self._connections.board, group_name(ranks)
        with self._connections.guard(call):
            work = start(group)
            if group.wait(work, min(_PATIENCE_S, call.left_s / 2)):
                return
            board.wait_at(name, number)
            if group.wait(work, call.left_s):
                return
        missing = board.not_waiting(name, number, ranks)
        raise self._connections.broken(call, call.missing(missing))

    def _empty(self, step: Step, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=torch_dtype(step.dtype), device=self._device)
