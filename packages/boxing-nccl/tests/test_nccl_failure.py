"""What happens when something goes wrong on channels that are connected."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from steps import collective, transfer
from test_nccl_bootstrap import HANGS_S, told
from thread_ranks import Ranks

from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.sbp import B, P


def summed(num_ranks: int) -> BoxingStep:
    return collective(StepKind.ALL_REDUCE, num_ranks, P, B)


def reduce(backend: NcclBackend, rank: int, num_ranks: int, tag: str, deadline_s: float) -> Any:
    return backend.communicator(rank).collective(
        summed(num_ranks), torch.ones(4, 2), tag=tag, deadline_s=deadline_s
    )


def connect_all(backend: NcclBackend, rank: int) -> None:
    """Connect one group and one pair of ranks in each direction."""
    reduce(backend, rank, 2, "first", 30.0)
    communicator, other = backend.communicator(rank), 1 - rank
    communicator.send(transfer([rank], [other], B, B), torch.ones(4, 2), tag="1", deadline_s=30.0)
    communicator.receive(transfer([other], [rank], B, B), None, tag="1", deadline_s=30.0)


def test_all_channels_are_aborted_together_and_once() -> None:
    ranks = Ranks(2)

    def job(rank: int, backend: NcclBackend) -> Any:
        connect_all(backend, rank)
        if rank == 1:
            while not all(channel.num_aborts for channel in ranks.devices[1].channels):
                time.sleep(0.01)  # until it has heard of the failure
            return told(partial(reduce, backend, rank, 2, "late", HANGS_S))
        return told(partial(reduce, backend, rank, 2, "second", 1.0))

    first, second = ranks.run(job)

    assert "'second'" in first and "did not arrive: 1" in first
    assert "rank 0 reported" in second and "'second'" in second
    for device in ranks.devices:
        assert [channel.num_aborts for channel in device.channels] == [1, 1, 1]
        assert [channel.num_destroys for channel in device.channels] == [0, 0, 0]
        # The last group is the one of the aborts.
        assert [call.name for call in device.calls[-2:]] == ["group_start", "group_end"]


def test_a_run_that_ends_well_destroys_its_channels_and_aborts_none() -> None:
    ranks = Ranks(2)

    ranks.run(lambda rank, backend: connect_all(backend, rank))

    for device in ranks.devices:
        assert [channel.num_aborts for channel in device.channels] == [0, 0, 0]
        assert [channel.num_destroys for channel in device.channels] == [1, 1, 1]


def test_an_abort_that_hangs_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    ranks, over = Ranks(2, abort_timeout_s=0.3), threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        connect_all(backend, rank)
        if rank == 1:
            assert over.wait(HANGS_S)
            return None
        ranks.devices[0].hold_abort.clear()
        said = told(partial(reduce, backend, rank, 2, "second", 0.5))
        over.set()
        return said

    try:
        said, _ = ranks.run(job)
    finally:
        ranks.devices[0].hold_abort.set()

    assert "did not arrive: 1" in said
    assert "rank 0 abandons 3 communicators" in caplog.text


def test_a_call_that_nccl_keeps_is_freed_at_its_deadline_and_says_who_did_not_come() -> None:
    """A first call may keep the host until all ranks have made it."""
    ranks, over = Ranks(2), threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        reduce(backend, rank, 2, "first", 30.0)
        if rank == 1:
            assert over.wait(HANGS_S)
            return None
        ranks.devices[0].keeps_host.add("all_reduce")
        said = told(partial(reduce, backend, rank, 2, "second", 1.0))
        over.set()
        return said

    said, _ = ranks.run(job)

    assert "'second'" in said and "did not arrive: 1" in said


def test_a_message_that_nobody_receives_in_time_fails_the_sender() -> None:
    over = threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        connect_all(backend, rank)
        if rank == 1:
            assert over.wait(HANGS_S)
            return None
        communicator, step = backend.communicator(0), transfer([0], [1], B, B)
        communicator.send(step, torch.ones(4, 2), tag="in vain", deadline_s=0.3)
        time.sleep(1.0)
        call = partial(communicator.send, step, torch.ones(4, 2), tag="next", deadline_s=5.0)
        said = told(call)
        over.set()
        return said

    said, _ = Ranks(2).run(job)

    assert "'next'" in said and "'in vain'" in said and "did not arrive: 1" in said


def test_a_message_of_another_size_than_awaited_is_refused_with_both_sizes() -> None:
    def job(rank: int, backend: NcclBackend) -> Any:
        communicator = backend.communicator(rank)
        if rank == 0:
            step = transfer([0], [1], B, B, shape=(4, 2))
            communicator.send(step, torch.ones(4, 2), tag="odd", deadline_s=5.0)
            return None
        step = transfer([0], [1], B, B, shape=(4, 3))
        return told(partial(communicator.receive, step, None, tag="odd", deadline_s=5.0))

    assert "rank 0 sends 32 bytes, and 48 are awaited" in Ranks(2).run(job)[1]


def test_an_error_that_nccl_finds_later_is_reported() -> None:
    ranks, over = Ranks(2), threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        reduce(backend, rank, 2, "first", 30.0)
        if rank == 1:
            assert over.wait(HANGS_S)
            return None
        (channel,) = ranks.devices[0].channels
        channel.error = "NCCL_ERROR_REMOTE_ERROR: remote process exited"
        said = told(partial(reduce, backend, rank, 2, "second", HANGS_S))
        over.set()
        return said

    said, _ = ranks.run(job)

    assert "'second'" in said and "remote process exited" in said


def test_running_ahead_a_missing_rank_is_told_by_the_next_call() -> None:
    over = threading.Event()

    def job(rank: int, backend: NcclBackend) -> Any:
        reduce(backend, rank, 2, "first", 30.0)
        if rank == 1:
            assert over.wait(HANGS_S)
            return None
        # What a GPU would do behind our back, the fake does while its stream is waited for.
        reduce(backend, rank, 2, "second", 0.5)
        said = told(partial(reduce, backend, rank, 2, "third", HANGS_S))
        over.set()
        return said

    said, _ = Ranks(2, run_ahead=True).run(job)

    assert "'third'" in said and "'second'" in said and "did not arrive: 1" in said


def test_a_failure_of_the_program_ends_calls_that_wait_on_both_ranks() -> None:
    def job(rank: int, backend: NcclBackend) -> Any:
        connect_all(backend, rank)
        if rank == 1:
            step = transfer([0], [1], B, B)
            communicator = backend.communicator(1)
            return told(partial(communicator.receive, step, None, tag="never", deadline_s=HANGS_S))
        threading.Timer(0.3, backend.fail, (ValueError("loss is not a number"),)).start()
        return told(partial(reduce, backend, rank, 2, "second", HANGS_S))

    here, there = Ranks(2).run(job)

    assert "'second'" in here and "loss is not a number" in here
    assert "'never'" in there and "rank 0 reported: ValueError: loss is not a number" in there


def test_a_closed_backend_says_so() -> None:
    def job(rank: int, backend: NcclBackend) -> str:
        reduce(backend, rank, 2, "first", 30.0)
        backend.close()
        backend.close()
        return told(partial(reduce, backend, rank, 2, "late", 5.0))

    for said in Ranks(2).run(job):
        assert "'late'" in said and "closed" in said


def test_a_rank_alone_needs_no_channel() -> None:
    ranks = Ranks(1)

    (total,) = ranks.run(lambda rank, backend: reduce(backend, rank, 1, "alone", 1.0).sum().item())

    assert total == 8.0
    assert ranks.devices[0].calls == []
