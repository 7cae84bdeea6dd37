"""What transports of several processes share, by itself: the suite, and bytes that are really sent.

The transport is a table of messages between threads. It counts what it is handed for other ranks,
and the suite compares that, not a formula, with the bytes predicted. Only an all-reduce is counted
by the formula: every transport has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sbp_core.boxing.execute import reduce_in_order, reduction_of
from sbp_core.boxing.processes.call import Call
from sbp_core.boxing.processes.connections import Connections
from sbp_core.boxing.processes.exchange import ExchangeCommunicator
from sbp_core.boxing.slices import sent_bytes
from sbp_core.boxing.step import StepKind
from sbp_core.testing.boxing import BoxingConformance, Program


class Mail:
    """Messages between threads, by sender, receiver and tag."""

    def __init__(self) -> None:
        self.came = threading.Condition()
        self.messages: dict[tuple[int, int, str], torch.Tensor] = {}


class MailConnections(Connections):
    def __init__(self, mail: Mail) -> None:
        super().__init__()
        self.mail = mail

    def _announce(self, text: str) -> None:
        """Nobody listens: each rank waits until its own deadline."""

    def _release(self) -> None:
        """There is nothing to release."""


class MailCommunicator(ExchangeCommunicator[MailConnections]):
    """Counts what is handed to the transport for other ranks, whatever it is told to count."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self.handed_bytes = 0
        super().__init__(MailConnections(mail), rank, torch.device("cpu"))

    @property
    def sent_bytes(self) -> int:
        return self.handed_bytes

    @sent_bytes.setter
    def sent_bytes(self, _: int) -> None:
        pass

    def _collective(
        self, call: Call, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> torch.Tensor:
        if call.step.kind is not StepKind.ALL_REDUCE:
            return self._exchange(call, ranks, shard)
        handed = self.handed_bytes + sent_bytes(call.step, self.rank)
        everyone = torch.stack([shard] * len(ranks))
        parts = torch.empty_like(everyone)
        sizes = [shard.numel()] * len(ranks)
        self._trade(call, ranks, parts.view(-1), everyone.view(-1), sizes, sizes)
        self.handed_bytes = handed
        return reduce_in_order(list(parts), reduction_of(call.step))

    def _post(self, call: Call, receiver: int, values: torch.Tensor) -> None:
        assert receiver != self.rank, "what stays here is no message"
        self._put(call, receiver, values)

    def _put(self, call: Call, receiver: int, values: torch.Tensor) -> None:
        mail = self._connections.mail
        if receiver != self.rank:
            self.handed_bytes += values.nbytes
        with mail.came:
            mail.messages[self.rank, receiver, call.tag] = values.clone()
            mail.came.notify_all()

    def _collect(self, call: Call, arriving: Mapping[int, torch.Tensor]) -> None:
        mail = self._connections.mail
        for sender, values in arriving.items():
            key = (sender, self.rank, call.tag)
            with mail.came:
                if not mail.came.wait_for(lambda key=key: key in mail.messages, call.left_s):
                    raise self._connections.broken(call, call.missing([sender]))
                message = mail.messages.pop(key)
            assert message.shape == values.shape, "both ends agree on the size"
            values.copy_(message)

    def _trade(
        self,
        call: Call,
        ranks: tuple[int, ...],
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        for rank, part in zip(ranks, sent.split(list(sent_sizes)), strict=True):
            self._put(call, rank, part)
        chunks = received.split(list(received_sizes))
        self._collect(call, dict(zip(ranks, chunks, strict=True)))


@pytest.mark.timeout(1800)
class TestExchangeConformance(BoxingConformance):
    name = "exchange"
    missing_deadline_s = 0.3
    rank_counts = (2, 3, 4)

    def run_ranks(self, num_ranks: int, program: Program) -> list[Any]:
        mail = Mail()
        with ThreadPoolExecutor(num_ranks) as threads:
            futures = [
                threads.submit(program, rank, MailCommunicator(mail, rank))
                for rank in range(num_ranks)
            ]
            return [future.result() for future in futures]
