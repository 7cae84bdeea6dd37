"""The ends of all steps of one rank: its collectives, how long to wait, what to say if not.

What goes where is `sbp_core.boxing.processes.exchange`; how is `group`; how it breaks is
`connections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sbp_boxing_nccl.connections import MpiConnections
from sbp_boxing_nccl.group import Group, Work, split
from sbp_core.boxing.execute import reduction_of
from sbp_core.boxing.processes.call import Call, group_name, tag_number
from sbp_core.boxing.processes.exchange import ExchangeCommunicator
from sbp_core.boxing.processes.manifest import manifest
from sbp_core.boxing.processes.parcel import Parcels, pack
from sbp_core.boxing.step import StepKind

#: Seconds after which a rank that waits in a collective tells the others that it is there.
_PATIENCE_S = 0.2


class MpiCommunicator(ExchangeCommunicator[MpiConnections]):
    """One rank's ends, over the connections of its process."""

    def __init__(self, connections: MpiConnections) -> None:
        super().__init__(connections, connections.rank, torch.device("cpu"))
        self._calls: dict[tuple[int, ...], int] = {}

    def _collective(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> torch.Tensor:
        """See `ExchangeCommunicator._collective`."""
        kind, given = call.step.kind, shard.detach()
        if kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, ranks, given, donate)
        if kind is StepKind.REDUCE_SCATTER:
            return self._reduce_scatter(call, ranks, given)
        if kind is StepKind.ALL_GATHER and manifest(call.step, self.rank).gathers:
            return self._all_gather(call, ranks, given)
        return self._exchange(call, ranks, given)

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

    def _all_reduce(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> torch.Tensor:
        if not shard.numel():
            return shard
        values, reduction = shard.contiguous().view(-1), reduction_of(call.step)
        result = values if donate else torch.empty_like(values)
        self._run(call, ranks, lambda group: group.all_reduce(result, values, reduction))
        return result.view(shard.shape)

    def _reduce_scatter(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor
    ) -> torch.Tensor:
        known, reduction = manifest(call.step, self.rank), reduction_of(call.step)
        parts = [pack(shard, [piece] if piece else []) for piece in known.outgoing]
        received = torch.empty_like(parts[known.place])
        if shard.numel():
            self._run(call, ranks, lambda group: group.reduce_scatter(received, parts, reduction))
        return received.view(known.shape)

    def _all_gather(self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor) -> torch.Tensor:
        """Run an all-gather in which everybody receives whole shards."""
        known = manifest(call.step, self.rank)
        parcels = Parcels(call.step, known, shard, device=self._device, whole=True)
        sizes = parcels.received_sizes
        if sum(sizes):
            self._run(
                call, ranks, lambda group: group.all_gather(parcels.received, parcels.sent, sizes)
            )
        parcels.keep_own()
        return parcels.result()

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
        places, parts = split(received, received_sizes), split(sent, sent_sizes)
        self._run(call, ranks, lambda group: group.exchange(places, parts))

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
