"""Messages find their receiver by tag, in any order, and wait for nobody else."""

import threading
import time
from typing import Any

import pytest
import torch
from fake_device import FakeEvent
from steps import transfer
from thread_ranks import Ranks

from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_core.sbp import B


def full(number: float) -> torch.Tensor:
    return torch.full((4, 2), float(number))


def test_messages_are_found_by_their_tags_whatever_the_order() -> None:
    def job(rank: int, backend: NcclBackend) -> list[float]:
        communicator, other = backend.communicator(rank), 1 - rank
        out, back = transfer([rank], [other], B, B), transfer([other], [rank], B, B)
        for number in range(10):
            communicator.send(out, full(10 * rank + number), tag=f"{number}", deadline_s=30.0)
        return [
            communicator.receive(back, None, tag=f"{number}", deadline_s=30.0).mean().item()
            for number in reversed(range(10))
        ]

    first, second = Ranks(2).run(job)

    assert first == [float(10 + number) for number in reversed(range(10))]
    assert second == [float(number) for number in reversed(range(10))]


def test_messages_of_one_tag_arrive_in_the_order_of_sending() -> None:
    def job(rank: int, backend: NcclBackend) -> list[float]:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == 0:
            for number in range(3):
                communicator.send(step, full(number), tag="same", deadline_s=30.0)
            communicator.send(step, full(9.0), tag="other", deadline_s=30.0)
            return []
        tags = ["other", "same", "same", "same"]
        return [
            communicator.receive(step, None, tag=tag, deadline_s=30.0).mean().item() for tag in tags
        ]

    assert Ranks(2).run(job)[1] == [9.0, 0.0, 1.0, 2.0]


def test_a_ring_in_which_all_send_before_they_receive_goes_round() -> None:
    def job(rank: int, backend: NcclBackend) -> float:
        communicator, after, before = backend.communicator(rank), (rank + 1) % 4, (rank - 1) % 4
        for turn in range(3):
            step = transfer([rank], [after], B, B)
            communicator.send(step, full(float(rank)), tag=f"{turn}", deadline_s=30.0)
        step = transfer([before], [rank], B, B)
        turns = [
            communicator.receive(step, None, tag=f"{turn}", deadline_s=30.0) for turn in range(3)
        ]
        return torch.stack(turns).mean().item()

    assert Ranks(4).run(job) == [3.0, 0.0, 1.0, 2.0]


def test_ranks_that_receive_from_several_in_different_orders_do_not_wait_in_a_circle() -> None:
    """With one channel for all, 0 would send to 2 first, 1 wait for 0, and 2 for 1."""

    def job(rank: int, backend: NcclBackend) -> float:
        communicator = backend.communicator(rank)

        def send(receiver: int) -> None:
            step = transfer([rank], [receiver], B, B)
            communicator.send(step, full(float(rank)), tag="x", deadline_s=30.0)

        def receive(sender: int) -> float:
            step = transfer([sender], [rank], B, B)
            return communicator.receive(step, None, tag="x", deadline_s=30.0).mean().item()

        if rank == 0:
            send(2)
            send(1)
            return 0.0
        if rank == 1:
            total = receive(0)
            send(2)
            return total
        return 10 * receive(1) + receive(0)

    assert Ranks(3).run(job) == [0.0, 0.0, 10.0]


def test_sending_does_not_wait_for_a_receiver_that_computes() -> None:
    received = threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == 0:
            communicator.send(step, full(5.0), tag="early", deadline_s=30.0)
            received.set()
            return None
        assert received.wait(10.0), "the sender waits for us"
        return communicator.receive(step, None, tag="early", deadline_s=30.0).mean().item()

    assert Ranks(2).run(job) == [None, 5.0]


def test_a_message_is_what_the_shard_was_when_it_was_sent() -> None:
    def job(rank: int, backend: NcclBackend) -> Any:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == 0:
            values = full(5.0)
            communicator.send(step, values, tag="early", deadline_s=30.0)
            values.zero_()
            return None
        return communicator.receive(step, None, tag="early", deadline_s=30.0).mean().item()

    assert Ranks(2).run(job) == [None, 5.0]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_messages_that_are_not_asked_for_are_kept_for_later(run_ahead: bool) -> None:
    def job(rank: int, backend: NcclBackend) -> Any:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == 0:
            for number in range(4):
                communicator.send(step, full(number), tag=f"{number}", deadline_s=30.0)
            return None
        last = communicator.receive(step, None, tag="3", deadline_s=30.0).mean().item()
        rest = [
            communicator.receive(step, None, tag=f"{number}", deadline_s=30.0).mean().item()
            for number in range(3)
        ]
        return [last, *rest]

    ranks = Ranks(2, run_ahead=run_ahead)
    for device in ranks.devices:
        device.lag_s = 0.05

    assert ranks.run(job)[1] == [3.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("late", [0, 1])
def test_neither_end_starts_before_its_memory_is_ready(late: int) -> None:
    ranks, ready = Ranks(2), FakeEvent()

    def job(rank: int, backend: NcclBackend) -> bool:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == late:
            # As if torch's stream were still at work on the memory.
            ranks.devices[rank].record = lambda: ready  # type: ignore[method-assign]
            threading.Timer(0.5, ready.come.set).start()
        if rank == 0:
            communicator.send(step, full(5.0), tag="x", deadline_s=30.0)
            return True
        communicator.receive(step, None, tag="x", deadline_s=30.0)
        return ready.is_done()

    assert ranks.run(job) == [True, True]


def test_nothing_is_started_for_a_message_before_its_receiver_asks_for_it() -> None:
    ranks, checked = Ranks(2), threading.Event()

    def job(rank: int, backend: NcclBackend) -> list[str]:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B, shape=(8,))
        wide = transfer([0], [1], B, B, shape=(16,))
        if rank == 0:
            communicator.send(step, torch.ones(8), tag="first", deadline_s=30.0)
            communicator.send(wide, torch.ones(16), tag="second", deadline_s=30.0)
            time.sleep(0.3)
            started = [call.name for call in ranks.devices[0].calls]
            checked.set()
            return started
        assert checked.wait(10.0)
        communicator.receive(wide, None, tag="second", deadline_s=30.0)
        communicator.receive(step, None, tag="first", deadline_s=30.0)
        return []

    started, _ = ranks.run(job)

    assert started == []
    assert [call.count for call in ranks.devices[0].calls] == [64, 32]
    assert [call.count for call in ranks.devices[1].calls if call.count] == [64, 32]


def test_a_rank_that_closes_waits_for_a_receiver_that_is_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_boxing_nccl.nccl.nccl_connections.CLOSE_TIMEOUT_S", 0.1)

    def job(rank: int, backend: NcclBackend) -> float:
        communicator, step = backend.communicator(rank), transfer([0], [1], B, B)
        if rank == 0:
            communicator.send(step, full(5.0), tag="last words", deadline_s=30.0)
            return 0.0
        time.sleep(1.0)
        return communicator.receive(step, None, tag="last words", deadline_s=30.0).mean().item()

    assert Ranks(2).run(job) == [0.0, 5.0]
