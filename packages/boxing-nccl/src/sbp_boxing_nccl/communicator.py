"""The ends of all steps of one rank: its collectives, how long to wait, what to say if not.

What goes where is `sbp_core.boxing.exchange`; how is `group`; how it breaks is `connections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sbp_boxing_nccl.connections import MpiConnections
from sbp_boxing_nccl.group import Group, Work
from sbp_boxing_nccl.wire import to_reducible
from sbp_core.boxing.call import Call, group_name, tag_number
from sbp_core.boxing.exchange import ExchangeCommunicator
from sbp_core.boxing.execute import reduction_of
from sbp_core.boxing.parcel import num_elements, pack
from sbp_core.boxing.slices import bounds_of, collective_pieces, volume
from sbp_core.boxing.step import StepKind

#: Seconds after which a rank that waits in a collective tells the others that it is there.
_PATIENCE_S = 0.2


class MpiCommunicator(ExchangeCommunicator[MpiConnections]):
    """One rank's ends, over the connections of its process."""

    def __init__(self, connections: MpiConnections) -> None:
        super().__init__(connections, connections.rank, torch.device("cpu"))
        self._calls: dict[tuple[int, ...], int] = {}

    def _collective(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """See `ExchangeCommunicator._collective`."""
        if call.step.kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, ranks, shard)
        if call.step.kind is StepKind.REDUCE_SCATTER:
            return self._reduce_scatter(call, ranks, shard)
        return self._regroup(call, ranks, shard)

    def _post(self, call: Call, receiver: int, values: torch.Tensor) -> None:
        """See `ExchangeCommunicator._post`."""
        self._connections.post(call, receiver, values, self._number(call))

    def _collect(self, call: Call, arriving: Mapping[int, torch.Tensor]) -> None:
        """See `ExchangeCommunicator._collect`."""
        group, number = self._connections.messages(), self._number(call)
        under_way: dict[int, Work] = {}
        for sender, values in arriving.items():
            with self._connections.guard(call):
                under_way[sender] = group.receive(values, sender, number)
        missing: list[int] = []
        for sender, work in under_way.items():
            if not self._connections.wait(call, group, work, call.left_s):
                missing.append(sender)
                self._connections.abandon(group, work)
        if missing:
            raise self._connections.broken(call, call.missing(missing))

    def _number(self, call: Call) -> int:
        return tag_number(call.tag, self._connections.largest_tag)

    def _all_reduce(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard
        values, reduction = to_reducible(shard.reshape(-1)), reduction_of(call.step)
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
        values, reduction = to_reducible(torch.cat(parts)), reduction_of(step)
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
        received = self._empty(step, sum(sizes))
        if sum(sizes):
            part = shard.reshape(-1).contiguous()
            self._run(call, ranks, lambda group: group.all_gather(received, part, sizes))
        parcels = dict(zip(ranks, torch.split(received, sizes), strict=True))
        return self._unpack(step, mine, parcels)

    def _trade(
        self,
        call: Call,
        ranks: tuple[int, ...],
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """See `ExchangeCommunicator._trade`."""
        self._run(
            call,
            ranks,
            lambda group: group.exchange(received, sent, received_sizes, sent_sizes),
        )

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
