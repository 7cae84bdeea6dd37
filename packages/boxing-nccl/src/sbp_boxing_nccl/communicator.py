"""One rank's part in every boxing step over MPI: which collective, and how long to wait.

`sbp_torch.boxing.processes.exchange` knows what goes where; `group` moves it; `connections` says
how it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sbp_boxing_nccl.connections import MpiConnections
from sbp_boxing_nccl.group import MpiGroup, MpiWork
from sbp_core.boxing import StepKind
from sbp_core.boxing.processes import CollectiveCall, Manifest, group_name, tag_number
from sbp_torch.boxing.processes import ExchangeCommunicator, PackedBuffers, Role, pack

#: Seconds after which a rank that waits in a collective reports that it is there.
_PATIENCE_S = 0.2

#: Looks at a collective that was just started, before it is waited for in earnest.
_EAGER_LOOKS = 256


class MpiCommunicator(ExchangeCommunicator[MpiConnections]):
    """One rank's part in every boxing step, over the connections of its process."""

    def __init__(self, connections: MpiConnections) -> None:
        super().__init__(connections, connections.rank, torch.device("cpu"))
        self._calls: dict[tuple[int, ...], int] = {}

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> torch.Tensor:
        """See `ExchangeCommunicator._collective`."""
        role = self._role(call)
        kind = role.step.kind
        if kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, role, shard, donate)
        if kind is StepKind.REDUCE_SCATTER:
            return self._reduce_scatter(call, role, shard)
        known = role.manifest
        if known.is_flat:
            return self._exchange_even(call, role, shard)
        if kind is StepKind.ALL_GATHER and known.gathers:
            return self._all_gather(call, ranks, shard, known)
        return self._exchange(call, ranks, shard)

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> None:
        """See `ExchangeCommunicator._post`."""
        self._connections.post(call, receiver, values, self._number(call))

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> None:
        """See `ExchangeCommunicator._collect`."""
        group, number = self._connections.messages(), self._number(call)
        under_way: dict[int, MpiWork] = {}
        for sender, values in arriving.items():
            with self._connections.guard(call):
                under_way[sender] = group.receive(values, sender, number)
        missing: list[int] = []
        for sender, work in under_way.items():
            if not self._connections.wait(call, group, work, call.left_s):
                missing.append(sender)
                self._connections.abandon(group, work)
        if missing:
            raise self._connections.call_failed(call, call.missing(missing))

    def _number(self, call: CollectiveCall) -> int:
        return tag_number(call.tag, self._connections.largest_tag)

    def _all_reduce(
        self, call: CollectiveCall, role: Role, shard: torch.Tensor, donate: bool
    ) -> torch.Tensor:
        if not shard.numel():
            return shard
        values, reduction = shard.contiguous(), role.reduction
        result = values if donate else torch.empty_like(values)
        self._run(call, role.ranks, lambda group: group.all_reduce(result, values, reduction))
        return result

    def _reduce_scatter(
        self, call: CollectiveCall, role: Role, shard: torch.Tensor
    ) -> torch.Tensor:
        known, reduction = role.manifest, role.reduction
        if known.packed:
            sent = shard.contiguous()
        else:
            sent = pack(shard, [piece for piece in known.outgoing if piece])
        result, sizes = shard.new_empty(known.shape), known.sent_sizes
        if shard.numel():
            self._run(
                call, role.ranks, lambda group: group.reduce_scatter(result, sent, sizes, reduction)
            )
        return result

    def _exchange_even(self, call: CollectiveCall, role: Role, shard: torch.Tensor) -> torch.Tensor:
        """Run an all-gather or all-to-all whose pieces are of one size and lie in order."""
        known, given = role.manifest, shard.contiguous()
        result = given.new_empty(known.shape)
        if known.gathers:
            self._run(call, role.ranks, lambda group: group.all_gather_even(result, given))
        else:
            self._run(call, role.ranks, lambda group: group.all_to_all_even(result, given))
        return result

    def _all_gather(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> torch.Tensor:
        """Run an all-gather in which everybody receives whole shards."""
        buffers = PackedBuffers(call.step, known, shard, device=self._device, whole=True)
        sizes = buffers.received_sizes
        if sum(sizes):
            self._run(
                call, ranks, lambda group: group.all_gather(buffers.received, buffers.sent, sizes)
            )
        buffers.keep_own()
        return buffers.result()

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> None:
        """See `ExchangeCommunicator._exchange_buffers`."""
        received, sent = buffers.received, buffers.sent
        sizes = buffers.received_sizes, buffers.sent_sizes
        self._run(call, ranks, lambda group: group.exchange(received, sent, *sizes))

    def _run(
        self, call: CollectiveCall, ranks: tuple[int, ...], start: Callable[[MpiGroup], MpiWork]
    ) -> None:
        """Start a collective in the group of `ranks` and wait for it.

        The ranks that wait long report it, so that each can say at its deadline who did not.
        """
        connections = self._connections
        number = self._calls[ranks] = self._calls.get(ranks, -1) + 1
        group = connections.group(call, ranks)
        work: MpiWork | None = None
        # As `connections.guard` and `wait` do, which take longer than a small message.
        try:
            work = start(group)
            self._count(group.traffic)
            if work.look(_EAGER_LOOKS, yields=False):
                return
        except (RuntimeError, OverflowError) as error:
            if work is not None:
                connections.abandon(group, work)
            raise connections.connection_lost(call, f"MPI reported: {error}") from error
        if connections.wait(call, group, work, min(_PATIENCE_S, call.left_s / 2)):
            return
        store, name = connections.control_store, group_name(ranks)
        store.report_waiting(name, number, ranks)
        if connections.wait(call, group, work, call.left_s):
            return
        connections.abandon(group, work)
        missing = store.not_waiting(name, number, ranks)
        raise connections.call_failed(call, call.missing(missing))
