"""The ends of all steps of one rank: its collectives, how long to wait, what to say if not.

What goes where is `sbp_core.boxing.exchange`; how is `group`; how it breaks is `connections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from sbp_boxing_torch.connections import TorchConnections
from sbp_boxing_torch.group import NUM_TAGS, Group
from sbp_boxing_torch.wire import as_bytes, from_reducible, reducible, to_reducible
from sbp_core.boxing.call import Call, group_name, tag_number
from sbp_core.boxing.exchange import ExchangeCommunicator
from sbp_core.boxing.execute import reduction_of
from sbp_core.boxing.parcel import num_elements, pack
from sbp_core.boxing.slices import Piece, collective_pieces
from sbp_core.boxing.step import StepKind

#: Seconds after which a rank that waits in a collective leaves a note that it is there.
_PATIENCE_S = 0.2


class TorchCommunicator(ExchangeCommunicator[TorchConnections]):
    """One rank's ends, over the connections of its process."""

    def __init__(self, connections: TorchConnections, rank: int, device: torch.device) -> None:
        super().__init__(connections, rank, device)
        self._calls: dict[tuple[int, ...], int] = {}

    def _collective(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """See `ExchangeCommunicator._collective`."""
        if call.step.kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, ranks, shard)
        return self._regroup(call, ranks, shard)

    def _post(self, call: Call, receiver: int, values: torch.Tensor) -> None:
        """See `ExchangeCommunicator._post`."""
        number = tag_number(call.tag, NUM_TAGS)
        self._connections.post(call, receiver, as_bytes(values), number)

    def _collect(self, call: Call, arriving: Mapping[int, torch.Tensor]) -> None:
        """See `ExchangeCommunicator._collect`."""
        under_way: list[tuple[int, Group, dist.Work]] = []
        for sender, values in arriving.items():
            group = self._connections.messages(sender, self.rank)
            with self._connections.guard(call):
                work = group.receive(as_bytes(values), sender, tag_number(call.tag, NUM_TAGS))
            under_way.append((sender, group, work))
        for sender, group, work in under_way:
            with self._connections.guard(call):
                if not group.wait_message(work, call.left_s):
                    raise self._connections.broken(call, call.missing([sender]))

    def _all_reduce(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard
        values, reduction = to_reducible(shard.reshape(-1), reduction_of(call.step))
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
            part = as_bytes(shard.reshape(-1).contiguous())
            self._run(call, ranks, lambda group: group.all_gather(parts, part, call.left_s))
            parcels = dict(zip(ranks, received.chunk(len(ranks)), strict=True))
            return self._unpack(step, mine, parcels)
        if even and step.kind is StepKind.REDUCE_SCATTER and reducible(shard.dtype):
            return self._reduce_scatter(call, ranks, shard, pieces)
        return self._exchange(call, ranks, shard, pieces)

    def _reduce_scatter(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, pieces: tuple[Piece, ...]
    ) -> torch.Tensor:
        reduction = reduction_of(call.step)
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
        size_bytes = received.element_size()
        bytes_in = [size_bytes * size for size in received_sizes]
        bytes_out = [size_bytes * size for size in sent_sizes]
        self._run(
            call,
            ranks,
            lambda group: group.exchange(
                as_bytes(received), as_bytes(sent), bytes_in, bytes_out, call.left_s
            ),
        )

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
