"""Runs the boxing steps (resharding collectives) of one rank over torch.distributed.

`ExchangeCommunicator` computes which slice goes to which rank. This module chooses the collective
and waits for it with a deadline, `group` moves the data, and `connections` handles errors and
timeouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from sbp_boxing_torch.connections import TorchConnections
from sbp_boxing_torch.group import NUM_TAGS, TorchGroup, as_bytes, reducible
from sbp_core.boxing import CollectiveCall, Manifest, StepKind
from sbp_core.processes import tag_number
from sbp_core.sbp import split_bounds
from sbp_torch.boxing import reduce_in_order, reduction_of
from sbp_torch.boxing.processes import Await, ExchangeCommunicator, Finish, PackedBuffers, after

#: Bytes of a shard up to which an all-reduce of two ranks on CPUs is faster as an exchange. Source:
#: a virtual machine of 2 cores, gloo of torch 2.13; with four ranks it is slower for every size.
_EXCHANGED_BYTES = 2**22

#: Bytes of a shard up to which an even all-to-all on CPUs uses gloo's, because a tensor operation
#: takes longer than to copy this rank's own part. Source: as above.
_EVEN_BYTES = 2**21


class TorchCommunicator(ExchangeCommunicator[TorchConnections]):
    """`ExchangeCommunicator` of one rank over torch.distributed.

    NCCL has fast collectives for parts of one size, and for sums. The collectives of gloo copy data
    once or twice more than an exchange, and its reduce-scatter sends as much as an all-reduce; only
    its all-reduce is used, for large data. All ranks choose alike, by the step alone.
    """

    def __init__(self, connections: TorchConnections, rank: int, device: torch.device) -> None:
        super().__init__(connections, rank, device)
        self._on_cpu = device.type == "cpu"

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        """See `ExchangeCommunicator._collective`."""
        if call.step.kind is StepKind.ALL_REDUCE:
            return self._all_reduce(call, ranks, shard, donate)
        known = self._role(call).manifest
        if call.step.kind is StepKind.ALL_GATHER and known.gathers and not known.is_idle:
            return self._all_gather(call, ranks, shard, known)
        native = not self._on_cpu and known.is_even and reducible(shard.dtype)
        if call.step.kind is StepKind.REDUCE_SCATTER and native:
            return self._reduce_scatter(call, ranks, shard, known)
        return self._exchange(call, ranks, shard)

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        """See `ExchangeCommunicator._post`."""
        number = tag_number(call.tag, NUM_TAGS)
        message = self._connections.post(call, receiver, as_bytes(values), number)
        return partial(self._connections.await_message, message)

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        """See `ExchangeCommunicator._collect`."""
        under_way: list[tuple[int, TorchGroup, dist.Work]] = []
        with self._connections.guard(call):
            for sender, values in arriving.items():
                group = self._connections.messages(sender, self.rank)
                work = group.receive(as_bytes(values), sender, tag_number(call.tag, NUM_TAGS))
                under_way.append((sender, group, work))
        return partial(self._await_messages, call, under_way)

    def _await_messages(
        self, call: CollectiveCall, under_way: Sequence[tuple[int, TorchGroup, dist.Work]]
    ) -> None:
        missing: list[int] = []
        with self._connections.guard(call):
            for sender, group, work in under_way:
                try:
                    came = group.wait_message(work, call.left_s)
                except RuntimeError:
                    # Waiting for a missing message may break the group; the ones that arrived are
                    # safe.
                    if not missing:
                        raise
                    came = False
                if not came:
                    missing.append(sender)
        if missing:
            raise self._connections.call_failed(call, call.missing(missing))

    def _all_reduce(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        if not shard.numel():
            return lambda: shard
        values = shard.contiguous().view(-1)
        spare = donate or values.data_ptr() != shard.data_ptr()
        is_small = values.numel() * values.element_size() <= _EXCHANGED_BYTES
        is_pair = len(ranks) == 2
        if reducible(shard.dtype) and not (self._on_cpu and is_pair and is_small):
            total = values if spare else values.clone()
            reduction = reduction_of(call.step)
            wait = self._launch(call, ranks, lambda group: [group.all_reduce(total, reduction)])
            return after(wait, lambda: total.view(shard.shape))
        if is_pair:
            finish = self._swap_and_reduce(call, ranks, values, spare)
        else:
            finish = self._reduce_parts(call, ranks, values, values if spare else None)
        return lambda: finish().view(shard.shape)

    def _swap_and_reduce(
        self, call: CollectiveCall, ranks: tuple[int, ...], values: torch.Tensor, spare: bool
    ) -> Finish:
        """Start the all-reduce of two ranks: each sends all its values, shape (elements,).

        `spare`: Whether the result may overwrite `values`.
        """
        size, received = values.numel(), torch.empty_like(values)
        sizes = [0 if rank == self.rank else size for rank in ranks]
        wait = self._launch(
            call, ranks, lambda group: [group.exchange(received, values, sizes, sizes)]
        )
        parts = [values if rank == self.rank else received for rank in ranks]
        out, reduction = values if spare else received, reduction_of(call.step)
        return after(wait, lambda: reduce_in_order(parts, reduction, out=out))

    def _reduce_parts(
        self,
        call: CollectiveCall,
        ranks: tuple[int, ...],
        values: torch.Tensor,
        total: torch.Tensor | None,
    ) -> Finish:
        """Start an all-reduce in two exchanges: each rank reduces a part, and sends it to all.

        Only the second is in flight on return. It is not started in the wait, because ranks that
        wait in different orders would start their second exchanges in different orders.

        Args:
            call: The call of the all-reduce.
            ranks: The group.
            values: The addends of this rank, shape (elements,).
            total: Tensor for the result; it may be `values`.
        """
        bounds = split_bounds(values.numel(), len(ranks))
        sizes = [stop - start for start, stop in bounds]
        size = sizes[ranks.index(self.rank)]
        received = values.new_empty(len(ranks), size)
        mine, room = [size] * len(ranks), received.view(-1)
        self._launch(call, ranks, lambda group: [group.exchange(room, values, mine, sizes)])()
        part = reduce_in_order(list(received), reduction_of(call.step), out=received[0])
        result = torch.empty_like(values) if total is None else total
        start, stop = bounds[ranks.index(self.rank)]
        result[start:stop] = part
        wait = self._launch(call, ranks, lambda group: group.all_gather(result, part, sizes))
        return after(wait, lambda: result)

    def _all_gather(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> Finish:
        buffers = PackedBuffers(call.step, known, shard, device=self._device, whole=True)
        received, sent, sizes = buffers.received, buffers.sent, buffers.received_sizes
        wait = self._launch(
            call, ranks, lambda group: group.all_gather(received, sent, sizes), buffers.keep_own
        )
        return after(wait, buffers.result)

    def _reduce_scatter(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, known: Manifest
    ) -> Finish:
        buffers = PackedBuffers(call.step, known, shard, device=self._device, with_own=True)
        result = shard.new_empty(known.shape)
        reduction = reduction_of(call.step)
        part, sent = result.view(-1), buffers.sent
        wait = self._launch(
            call, ranks, lambda group: [group.reduce_scatter(part, sent, reduction)]
        )
        return after(wait, lambda: result)

    def _exchange(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor
    ) -> Finish:
        """See `ExchangeCommunicator._exchange`."""
        known = self._role(call).manifest
        if self._on_cpu and known.is_flat and shard.nbytes <= _EVEN_BYTES:
            given, result = shard.contiguous(), shard.new_empty(known.shape)
            sent, received = given.view(-1), result.view(-1)
            wait = self._launch(call, ranks, lambda group: [group.exchange(received, sent, (), ())])
            return after(wait, lambda: result)
        return super()._exchange(call, ranks, shard)

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        """See `ExchangeCommunicator._exchange_buffers`; copies the rank's own chunk meanwhile."""
        received, sent = buffers.received, buffers.sent
        sizes = buffers.received_sizes, buffers.sent_sizes
        return self._launch(
            call, ranks, lambda group: [group.exchange(received, sent, *sizes)], buffers.keep_own
        )

    def _launch(
        self,
        call: CollectiveCall,
        ranks: tuple[int, ...],
        start: Callable[[TorchGroup], Sequence[dist.Work]],
        meanwhile: Callable[[], None] | None = None,
    ) -> Await:
        """Start a collective in the group of `ranks`; return a function that waits for it.

        Args:
            call: The call that starts it.
            ranks: The group.
            start: Starts it and returns its works.
            meanwhile: Called before the wait.
        """
        connections = self._connections
        number = connections.arrivals.begin(ranks)
        group = connections.group(call, ranks)
        try:
            under_way = list(start(group))
            self._count(group.traffic)
            if meanwhile is not None:
                meanwhile()
        except RuntimeError as error:
            raise connections.transport_failed(call, error) from error
        connections.begun[id(under_way)] = group, under_way

        def over(limit_s: float) -> bool:
            while under_way and group.wait(under_way[0], min(limit_s, call.left_s)):
                del under_way[0]
            return not under_way

        def wait() -> None:
            key = id(under_way)
            connections.await_collective(call, ranks, number, over)
            del connections.begun[key]

        return wait
