"""The ends of all steps of one rank: which pieces go where, how long to wait, what to say if not.

What is moved is `sbp_core.boxing.slices`; how is `group`; the life of connections is `connections`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sbp_boxing_nccl.call import Call
from sbp_boxing_nccl.connections import Connections, group_name
from sbp_boxing_nccl.group import Group, Work
from sbp_boxing_nccl.parcel import num_elements, pack, unpack
from sbp_boxing_nccl.wire import tag_number, to_reducible
from sbp_core.boxing.backend import Communicator
from sbp_core.boxing.execute import check_shard, combine, torch_dtype
from sbp_core.boxing.slices import (
    Piece,
    bounds_of,
    collective_pieces,
    sent_bytes,
    transfer_pieces,
    volume,
)
from sbp_core.boxing.step import Step, StepKind
from sbp_core.sbp import Partial

#: Seconds after which a rank that waits in a collective tells the others that it is there.
_PATIENCE_S = 0.2


class MpiCommunicator(Communicator):
    """One rank's ends, over the connections of its process."""

    def __init__(self, connections: Connections) -> None:
        self.rank = connections.rank
        self.sent_bytes = 0
        self._connections = connections
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
        elif step.kind is StepKind.REDUCE_SCATTER:
            result = self._reduce_scatter(call, ranks, shard)
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
            values = pack(shard, pieces).clone()
            self._connections.post(call, receiver, values, self._number(tag))
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
        if self.rank in by_sender:
            if shard is None:
                raise call.failed("this rank is a sender too, and gave no shard to receive()")
            check_shard(step, self.rank, shard)
            parcels[self.rank] = pack(shard, by_sender.pop(self.rank))
        group, arriving = self._connections.messages(), {}
        for sender, pieces in by_sender.items():
            parcels[sender] = _empty(step, num_elements(step, pieces))
            with self._connections.guard(call):
                arriving[sender] = group.receive(parcels[sender], sender, self._number(tag))
        self._await_messages(call, group, arriving)
        return combine(step, self.rank, unpack(mine, parcels))

    def _await_messages(self, call: Call, group: Group, arriving: dict[int, Work]) -> None:
        missing: list[int] = []
        for sender, work in arriving.items():
            if not self._connections.wait(call, group, work, call.left_s):
                missing.append(sender)
                self._connections.abandon(group, work)
        if missing:
            raise self._connections.broken(call, call.missing(missing))

    def _begin(self, step: Step, tag: str, deadline_s: float) -> Call:
        call = Call.begin(step, tag, self.rank, deadline_s)
        self._connections.check_usable(call)
        return call

    def _number(self, tag: str) -> int:
        return tag_number(tag, self._connections.largest_tag)

    def _all_reduce(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard
        values, reduction = to_reducible(shard.reshape(-1)), _reduction(call.step)
        self._run(call, ranks, lambda group: group.all_reduce(values, reduction, shard.dtype))
        return values.to(shard.dtype).reshape(shard.shape)

    def _reduce_scatter(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor
    ) -> torch.Tensor:
        step = call.step
        sent = {
            piece.receiver: piece
            for piece in collective_pieces(step, ranks)
            if piece.sender == self.rank
        }
        parts = [pack(shard, [sent[rank]] if rank in sent else []) for rank in ranks]
        sizes = [part.numel() for part in parts]
        values, reduction = to_reducible(torch.cat(parts)), _reduction(step)
        received = values.new_empty(sizes[ranks.index(self.rank)])
        if sum(sizes):
            self._run(
                call,
                ranks,
                lambda group: group.reduce_scatter(received, values, sizes, reduction, shard.dtype),
            )
        bounds = bounds_of(step.shape, *step.target)[self.rank]
        return received.to(shard.dtype).reshape([stop - start for start, stop in bounds])

    def _regroup(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """Run an all-gather or all-to-all."""
        step, pieces = call.step, collective_pieces(call.step, ranks)
        mine = [piece for piece in pieces if piece.receiver == self.rank]
        held = bounds_of(step.shape, *step.source)
        sizes = [volume(held[rank]) for rank in ranks]
        whole = dict(zip(ranks, sizes, strict=True))
        gathers = all(num_elements(step, [piece]) == whole[piece.sender] for piece in pieces)
        if step.kind is not StepKind.ALL_GATHER or not gathers:
            return self._exchange(call, ranks, shard, pieces)
        received = _empty(step, sum(sizes))
        if sum(sizes):
            part = shard.reshape(-1)
            self._run(call, ranks, lambda group: group.all_gather(received, part, sizes))
        parcels = dict(zip(ranks, torch.split(received, sizes), strict=True))
        return combine(step, self.rank, unpack(mine, parcels))

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
        sizes_in = [num_elements(step, given) for given in incoming]
        sizes_out = [num_elements(step, given) for given in outgoing]
        received = _empty(step, sum(sizes_in))
        if others:
            sent = torch.cat([pack(shard, given) for given in outgoing])
            self._run(
                call,
                ranks,
                lambda group: group.exchange(received, sent, sizes_in, sizes_out),
            )
        parcels = dict(zip(ranks, torch.split(received, sizes_in), strict=True))
        return combine(step, self.rank, unpack(mine, parcels | {self.rank: own}))

    def _run(self, call: Call, ranks: tuple[int, ...], start: Callable[[Group], Work]) -> None:
        """Start a collective in the group of `ranks` and wait for it.

        The ranks that wait long tell each other, so that each can say at its deadline who did not.
        """
        connections, name = self._connections, group_name(ranks)
        number = self._calls[ranks] = self._calls.get(ranks, -1) + 1
        group = connections.group(call, ranks)
        with connections.guard(call):
            work = start(group)
        if connections.wait(call, group, work, min(_PATIENCE_S, call.left_s / 2)):
            return
        connections.board.wait_at(name, number, ranks)
        if connections.wait(call, group, work, call.left_s):
            return
        connections.abandon(group, work)
        missing = connections.board.not_waiting(name, number, ranks)
        raise connections.broken(call, call.missing(missing))


def _reduction(step: Step) -> str:
    entry = step.source[1][step.axis]
    assert isinstance(entry, Partial), "only partial values are reduced"
    return entry.reduction


def _empty(step: Step, elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=torch_dtype(step.dtype))
