"""What transports of several processes share, by itself: the suite, and bytes that are really sent.

The transport is a table of messages between threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from no_control_store import NoControlStore

from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.boxing.manifest import TrafficCounter
from sbp_core.boxing.step import StepKind
from sbp_core.processes.connections import Connections
from sbp_torch.boxing.execute import reduce_in_order, reduction_of
from sbp_torch.boxing.processes.exchange import Await, ExchangeCommunicator, Finish, after
from sbp_torch.boxing.processes.packed_buffer import PackedBuffers
from sbp_torch.testing.boxing import BoxingConformance, Program


class Mail:
    """Messages between threads, by sender, receiver and tag."""

    def __init__(self) -> None:
        self.came = threading.Condition()
        self.messages: dict[tuple[int, int, str], torch.Tensor] = {}


class MailConnections(Connections):
    def __init__(self, mail: Mail) -> None:
        super().__init__(NoControlStore())
        self.mail = mail

    def _announce(self, text: str) -> None:
        """Nobody listens: each rank waits until its own deadline."""

    def _release(self) -> None:
        """There is nothing to release."""


class MailCommunicator(ExchangeCommunicator[MailConnections]):
    """Puts every chunk into the table; an all-reduce takes everything to everybody.

    Args:
        mail: The table.
        rank: Of this end.
        padding: Elements that are appended to each chunk.
    """

    def __init__(self, mail: Mail, rank: int, padding: int = 0) -> None:
        super().__init__(MailConnections(mail), rank, torch.device("cpu"))
        self._padding = padding

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        if call.step.kind is not StepKind.ALL_REDUCE:
            return self._exchange(call, ranks, shard)
        traffic = TrafficCounter(len(ranks), ranks.index(self.rank))
        traffic.all_reduce(shard.numel(), shard.element_size())
        self._count(traffic)
        for rank in ranks:
            self._put(call, rank, shard)
        parts = {rank: torch.empty_like(shard) for rank in ranks}
        return after(
            self._collect(call, parts),
            lambda: reduce_in_order(list(parts.values()), reduction_of(call.step)),
        )

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        assert receiver != self.rank, "what stays here is no message"
        self._put(call, receiver, values)
        return partial(self._await_receiver, call, receiver)

    def _await_receiver(self, call: CollectiveCall, receiver: int) -> None:
        mail, key = self._connections.mail, (self.rank, receiver, call.tag)
        with mail.came:
            if not mail.came.wait_for(lambda: key not in mail.messages, call.left_s):
                raise self._connections.call_failed(call, call.missing([receiver]))

    def _put(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> None:
        mail = self._connections.mail
        with mail.came:
            mail.messages[self.rank, receiver, call.tag] = values.clone()
            mail.came.notify_all()

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        return partial(self._take, call, arriving)

    def _take(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> None:
        mail = self._connections.mail
        keys = {sender: (sender, self.rank, call.tag) for sender in arriving}
        with mail.came:
            mail.came.wait_for(lambda: mail.messages.keys() >= {*keys.values()}, call.left_s)
            missing = [sender for sender, key in keys.items() if key not in mail.messages]
            if missing:
                raise self._connections.call_failed(call, call.missing(missing))
            messages = {sender: mail.messages.pop(key) for sender, key in keys.items()}
            mail.came.notify_all()
        for sender, values in arriving.items():
            assert messages[sender].shape == values.shape, "both ends agree on the size"
            values.copy_(messages[sender])

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        sent = buffers.sent.split(list(buffers.sent_sizes))
        padded = [torch.cat((part, part.new_zeros(self._padding))) for part in sent]
        traffic = TrafficCounter(len(ranks), ranks.index(self.rank))
        traffic.exchange([len(part) for part in padded], buffers.sent.element_size())
        self._count(traffic)
        for rank, part in zip(ranks, padded, strict=True):
            self._put(call, rank, part)
        chunks = dict(zip(ranks, buffers.received.split(list(buffers.received_sizes)), strict=True))
        rooms = {
            rank: chunk.new_empty(len(chunk) + self._padding) for rank, chunk in chunks.items()
        }
        await_rooms = self._collect(call, rooms)

        def finish() -> None:
            await_rooms()
            for rank, chunk in chunks.items():
                chunk.copy_(rooms[rank][: len(chunk)])

        return finish


@pytest.mark.timeout(1800)
class TestExchangeConformance(BoxingConformance):
    name = "exchange"
    missing_deadline_s = 0.3
    rank_counts = (2, 3, 4)
    padding = 0

    def run_ranks(self, num_ranks: int, program: Program) -> list[Any]:
        mail = Mail()
        with ThreadPoolExecutor(num_ranks) as threads:
            futures = [
                threads.submit(program, rank, MailCommunicator(mail, rank, self.padding))
                for rank in range(num_ranks)
            ]
            return [future.result() for future in futures]


def test_a_transport_that_pads_what_it_sends_is_found_out() -> None:
    suite = TestExchangeConformance()
    suite.padding = 3

    with pytest.raises(AssertionError, match=r"bytes sent, .* predicted"):
        suite.test_a_sample_on_two_ranks()
