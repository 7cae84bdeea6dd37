"""Runs the boxing steps (resharding collectives) of one rank over NCCL, with few copies.

All-reduce, and reduce-scatter and all-gather of equal shards, use NCCL's collectives. Other steps
send slices of exact size point to point and reduce them locally, in mesh order.
`ExchangeCommunicator` computes which slice goes to which rank, `nccl_group` and `messages` send
them, and `nccl_connections` handles errors and timeouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from sbp_boxing_nccl.nccl.nccl_connections import NcclConnections
from sbp_boxing_nccl.nccl.nccl_group import NcclGroup, NcclWork, reducible, restored
from sbp_core.boxing import CollectiveCall, Manifest, StepKind
from sbp_torch.boxing import reduction_of
from sbp_torch.boxing.processes import (
    Await,
    ExchangeCommunicator,
    Finish,
    PackedBuffers,
    after,
    pack,
)


class NcclCommunicator(ExchangeCommunicator[NcclConnections]):
    """`ExchangeCommunicator` of one rank over NCCL."""

    def __init__(self, connections: NcclConnections) -> None:
        super().__init__(connections, connections.rank, connections.device.torch_device)

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        """See `ExchangeCommunicator._collective`."""
        if call.step.kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, ranks, shard, donate)
        # NCCL's collectives need parts of one size. Unequal parts are sent at their exact sizes,
        # and reduced here, in mesh order.
        known = self._role(call).manifest
        if known.is_even and call.step.kind is StepKind.REDUCE_SCATTER:
            return self._reduce_scatter(call, ranks, shard, known)
        if known.is_even and known.gathers and call.step.kind is StepKind.ALL_GATHER:
            return self._all_gather(call, ranks, shard, known)
        return self._exchange(call, ranks, shard)

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        """See `ExchangeCommunicator._post`."""
        message = self._connections.post(call, receiver, values)
        return partial(self._connections.await_message, call, receiver, message)

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        """See `ExchangeCommunicator._collect`; messages are requested when the caller waits."""
        if not arriving:
            return lambda: None
        return partial(self._connections.collect, call, arriving)

    def _all_reduce(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        if not shard.numel():
            return lambda: shard
        flat = shard.contiguous().view(-1)
        values, reduction = reducible(flat, reduction_of(call.step))
        ours = donate or values.data_ptr() != shard.data_ptr()
        received = values if ours else torch.empty_like(values)
        wait = self._launch(
            call, ranks, lambda group: group.all_reduce(received, values, reduction)
        )
        return after(wait, lambda: restored(received, shard.dtype).view(shard.shape))

    def _reduce_scatter(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> Finish:
        if known.packed:
            flat = shard.contiguous().view(-1)
        else:
            flat = pack(shard, [piece for piece in known.outgoing if piece])
        values, reduction = reducible(flat, reduction_of(call.step))
        received = values.new_empty(values.numel() // len(ranks))
        wait = self._launch(
            call, ranks, lambda group: group.reduce_scatter(received, values, reduction)
        )
        return after(wait, lambda: restored(received, shard.dtype).view(known.shape))

    def _all_gather(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> Finish:
        buffers = PackedBuffers(call.step, known, shard, device=self._device, whole=True)
        if not known.unpacked:  # else NCCL copies it there, like the other parts
            buffers.keep_own()
        wait = self._launch(
            call, ranks, lambda group: group.all_gather(buffers.received, buffers.sent)
        )
        return after(wait, buffers.result)

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        """See `ExchangeCommunicator._exchange_buffers`."""
        sizes = buffers.received_sizes, buffers.sent_sizes
        buffers.keep_own()
        return self._launch(
            call, ranks, lambda group: group.exchange(buffers.received, buffers.sent, *sizes)
        )

    def _launch(
        self, call: CollectiveCall, ranks: tuple[int, ...], start: Callable[[NcclGroup], NcclWork]
    ) -> Await:
        """Start a collective in the group of `ranks`; return a function that waits for it."""
        connections, arrivals = self._connections, self._connections.arrivals
        number = arrivals.begin(ranks)
        group = connections.group(call, ranks)
        with (
            connections.guard(call),
            connections.deadlines.launching(
                call,
                lambda: arrivals.missing(ranks, number),
                lambda: arrivals.tell(ranks),
            ) as entry,
        ):
            entry.work = start(group)
            self._count(group.traffic)
            entry.caller_waits = not connections.runs_ahead
        connections.begun[id(entry)] = entry

        def wait() -> None:
            del connections.begun[id(entry)]
            over = partial(connections.is_over, call, entry)
            connections.await_collective(call, ranks, number, over)

        return wait
