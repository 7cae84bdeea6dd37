"""Runs the boxing steps (resharding collectives) of one rank over MPI.

`ExchangeCommunicator` computes which slice goes to which rank. This module chooses the collective
and waits for it with a deadline, `mpi_group` moves the data, and `mpi_connections` handles errors
and timeouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from sbp_boxing_nccl.mpi.mpi_connections import MpiConnections
from sbp_boxing_nccl.mpi.mpi_group import MpiGroup, MpiWork
from sbp_core.boxing import CollectiveCall, Manifest, StepKind
from sbp_core.processes import tag_number
from sbp_torch.boxing.processes import (
    Await,
    ExchangeCommunicator,
    Finish,
    PackedBuffers,
    Role,
    after,
    pack,
)

#: Polls of a collective before the full wait with its checks.
_EAGER_LOOKS = 256


class MpiCommunicator(ExchangeCommunicator[MpiConnections]):
    """`ExchangeCommunicator` of one rank over MPI."""

    def __init__(self, connections: MpiConnections) -> None:
        super().__init__(connections, connections.rank, torch.device("cpu"))

    def progress(self) -> None:
        """See `Communicator.progress`: MPI moves data only while it is called."""
        self._connections.progress()

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
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

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        """See `ExchangeCommunicator._post`."""
        message = self._connections.post(call, receiver, values, self._number(call))
        return partial(self._connections.await_message, message)

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        """See `ExchangeCommunicator._collect`."""
        group, number = self._connections.messages, self._number(call)
        under_way: dict[int, MpiWork] = {}
        for sender, values in arriving.items():
            with self._connections.guard(call):
                under_way[sender] = group.receive(values, sender, number)
        for work in under_way.values():
            self._connections.begun[id(work)] = group, work
        return partial(self._await_messages, call, group, under_way)

    def _await_messages(
        self, call: CollectiveCall, group: MpiGroup, under_way: Mapping[int, MpiWork]
    ) -> None:
        missing: list[int] = []
        for sender, work in under_way.items():
            self._connections.begun.pop(id(work), None)
            try:
                if not self._connections.wait(call, work, call.left_s):
                    missing.append(sender)
            finally:
                if not work.is_over:
                    self._connections.abandon(group, work)
        if missing:
            raise self._connections.call_failed(call, call.missing(missing))

    def _number(self, call: CollectiveCall) -> int:
        return tag_number(call.tag, self._connections.largest_tag)

    def _all_reduce(
        self, call: CollectiveCall, role: Role, shard: torch.Tensor, donate: bool
    ) -> Finish:
        if not shard.numel():
            return lambda: shard
        values, reduction = shard.contiguous(), role.reduction
        result = values if donate else torch.empty_like(values)
        wait = self._launch(
            call, role.ranks, lambda group: group.all_reduce(result, values, reduction)
        )
        return after(wait, lambda: result)

    def _reduce_scatter(self, call: CollectiveCall, role: Role, shard: torch.Tensor) -> Finish:
        known, reduction = role.manifest, role.reduction
        if known.packed:
            sent = shard.contiguous()
        else:
            sent = pack(shard, [piece for piece in known.outgoing if piece])
        result, sizes = shard.new_empty(known.shape), known.sent_sizes
        if not shard.numel():
            return lambda: result
        wait = self._launch(
            call, role.ranks, lambda group: group.reduce_scatter(result, sent, sizes, reduction)
        )
        return after(wait, lambda: result)

    def _exchange_even(self, call: CollectiveCall, role: Role, shard: torch.Tensor) -> Finish:
        """Run an all-gather or all-to-all whose pieces have one size and are in order."""
        known, given = role.manifest, shard.contiguous()
        gathers = known.gathers
        result = given.new_empty(known.shape)
        wait = self._launch(
            call,
            role.ranks,
            lambda group: group.exchange_even(result, given, gathers=gathers),
        )
        return after(wait, lambda: result)

    def _all_gather(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> Finish:
        """Run an all-gather in which every rank receives whole shards."""
        buffers = PackedBuffers(call.step, known, shard, device=self._device, whole=True)
        sizes = buffers.received_sizes
        if not sum(sizes):
            return buffers.result
        wait = self._launch(
            call, ranks, lambda group: group.all_gather(buffers.received, buffers.sent, sizes)
        )
        buffers.keep_own()
        return after(wait, buffers.result)

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        """See `ExchangeCommunicator._exchange_buffers`."""
        received, sent = buffers.received, buffers.sent
        sizes = buffers.received_sizes, buffers.sent_sizes
        return self._launch(call, ranks, lambda group: group.exchange(received, sent, *sizes))

    def _launch(
        self, call: CollectiveCall, ranks: tuple[int, ...], start: Callable[[MpiGroup], MpiWork]
    ) -> Await:
        """Start a collective in the group of `ranks`; return a function that waits for it."""
        connections = self._connections
        number = connections.arrivals.begin(ranks)
        group = connections.group(call, ranks)
        work: MpiWork | None = None

        try:
            work = start(group)
            self._count(group.traffic)
            work.look(yields=False)  # the first look starts it, in the same order on all ranks
        except connections.transport_errors as error:
            if work is not None:
                connections.abandon(group, work)
            raise connections.transport_failed(call, error) from error
        connections.begun[id(work)] = group, work
        return partial(self._await, call, ranks, number, group, work)

    def _await(
        self,
        call: CollectiveCall,
        ranks: tuple[int, ...],
        number: int,
        group: MpiGroup,
        work: MpiWork,
    ) -> None:
        """Wait for a collective that has begun."""
        connections = self._connections
        del connections.begun[id(work)]

        def over(limit_s: float) -> bool:
            return (
                work.is_over
                or work.look(_EAGER_LOOKS, yields=False)
                or connections.wait(call, work, limit_s)
            )

        try:
            connections.await_collective(call, ranks, number, over)
        finally:
            if not work.is_over:
                connections.abandon(group, work)
