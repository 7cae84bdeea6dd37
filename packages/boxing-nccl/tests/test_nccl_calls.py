"""What is called on NCCL for each kind of step: how, in which order, with how many elements."""

import threading
from typing import Any

import pytest
import torch
from fake_device import Call, FakeEvent
from steps import collective, expected, parts, transfer
from thread_ranks import Ranks

from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.sbp import B, P, S


def run(step: BoxingStep, num_ranks: int, *, lag_s: float = 0.0, **config: Any) -> list[list[Call]]:
    """Run a step, check every rank's result, and return what each rank called."""
    ranks = Ranks(num_ranks, **config)
    for device in ranks.devices:
        device.lag_s = lag_s
    values = torch.arange(torch.Size(step.shape).numel()).reshape(step.shape)
    given = parts(step, values.to(getattr(torch, step.dtype)))

    def job(rank: int, backend: NcclBackend) -> Any:
        communicator = backend.communicator(rank)
        if step.kind is not StepKind.TRANSFER:
            result = communicator.collective(step, given[rank], tag="step", deadline_s=30.0)
            return result.clone()  # at once, whatever is under way
        if rank in step.source[0]:
            communicator.send(step, given[rank], tag="step", deadline_s=30.0)
        if rank in step.target[0]:
            mine = given.get(rank)
            return communicator.receive(step, mine, tag="step", deadline_s=30.0).clone()
        return None

    results = ranks.run(job)
    for rank, result in expected(step, given).items():
        assert torch.equal(results[rank], result), f"rank {rank}"
    return [device.calls for device in ranks.devices]


def named(calls: list[Call]) -> list[tuple[str, int, str, int]]:
    """Calls without their channel."""
    return [(call.name, call.count, call.dtype, call.peer) for call in calls]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "count", "as_dtype"),
    [
        ("float32", 8, "float32"),
        ("bfloat16", 8, "bfloat16"),
        ("int64", 8, "int64"),
        ("bool", 8, "uint8"),
        ("int16", 8, "int32"),
        ("complex64", 16, "float32"),
    ],
)
def test_an_all_reduce_is_one_call_in_a_dtype_that_nccl_reduces(
    num_ranks: int, dtype: str, count: int, as_dtype: str
) -> None:
    step = collective(StepKind.ALL_REDUCE, num_ranks, P, B, dtype=dtype)

    for calls in run(step, num_ranks):
        assert named(calls) == [("all_reduce", count, as_dtype, -1)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_even_reduce_scatter_is_one_call_with_the_size_of_a_part(
    num_ranks: int, dim: int
) -> None:
    step = collective(StepKind.REDUCE_SCATTER, num_ranks, P, S(dim), shape=(12, 24))

    for calls in run(step, num_ranks):
        assert named(calls) == [("reduce_scatter", 12 * 24 // num_ranks, "float32", -1)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_even_all_gather_is_one_call_with_the_bytes_of_a_part(num_ranks: int, dim: int) -> None:
    step = collective(StepKind.ALL_GATHER, num_ranks, S(dim), B, shape=(12, 24), dtype="bfloat16")

    for calls in run(step, num_ranks):
        assert named(calls) == [("all_gather", 2 * 12 * 24 // num_ranks, "uint8", -1)]


def test_an_uneven_all_gather_is_one_group_of_messages_of_exact_sizes() -> None:
    step = collective(StepKind.ALL_GATHER, 3, S(0), B, shape=(7, 2))  # 3, 2 and 2 rows

    for rank, calls in enumerate(run(step, 3)):
        mine, others = [24, 16, 16][rank], [r for r in range(3) if r != rank]
        exchanged = [
            entry
            for peer in others
            for entry in (
                ("send", mine, "uint8", peer),
                ("receive", [24, 16, 16][peer], "uint8", peer),
            )
        ]
        assert named(calls) == [
            ("group_start", 0, "", -1),
            *exchanged,
            ("group_end", 0, "", -1),
        ]


def test_an_uneven_reduce_scatter_sends_each_rank_its_part_and_reduces_there() -> None:
    step = collective(StepKind.REDUCE_SCATTER, 3, P, S(0), shape=(4, 1))  # 2, 1 and 1 rows

    for rank, calls in enumerate(run(step, 3)):
        sizes = {call.peer: call.count for call in calls if call.name == "send"}
        assert sizes == {peer: [8, 4, 4][peer] for peer in range(3) if peer != rank}
        assert {call.count for call in calls if call.name == "receive"} == {[8, 4, 4][rank]}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_an_all_to_all_is_one_group_without_messages_to_oneself(num_ranks: int) -> None:
    step = collective(StepKind.ALL_TO_ALL, num_ranks, S(0), S(1), shape=(12, 12), dtype="float64")

    for rank, calls in enumerate(run(step, num_ranks)):
        size = 8 * 144 // num_ranks**2
        peers = [peer for peer in range(num_ranks) if peer != rank]
        assert (calls[0].name, calls[-1].name) == ("group_start", "group_end")
        for name in ("send", "receive"):
            found = [call for call in calls if call.name == name]
            assert [(call.count, call.peer) for call in found] == [(size, peer) for peer in peers]


def test_an_empty_part_is_not_sent() -> None:
    step = collective(StepKind.ALL_GATHER, 3, S(0), B, shape=(1, 2))

    first, second, third = run(step, 3)

    assert [call.peer for call in first if call.name == "send"] == [1, 2]
    assert [call.name for call in second] == ["group_start", "receive", "group_end"]
    assert [call.name for call in third] == ["group_start", "receive", "group_end"]


def test_a_transfer_is_a_message_for_each_pair_on_a_channel_of_the_pair() -> None:
    step = transfer([0, 1], [2, 3], S(0), B)

    calls = run(step, 4)

    for sender in (0, 1):
        sent = [call for call in calls[sender] if call.name == "send"]
        assert [(call.count, call.peer) for call in sent] == [(16, 1), (16, 1)]
    for receiver in (2, 3):
        came = [call for call in calls[receiver] if call.name == "receive"]
        assert [(call.count, call.peer) for call in came] == [(16, 0), (16, 0)]
        assert len({call.channel for call in came}) == 2


def test_a_rank_that_keeps_its_part_receives_nothing() -> None:
    step = transfer([0, 1], [1, 2], B, B)

    _, second, third = run(step, 3)

    assert {call.name for call in second} <= {"send"}
    assert [call.name for call in third] == ["group_start", "receive", "group_end"]


@pytest.mark.parametrize(
    "step",
    [
        collective(StepKind.ALL_REDUCE, 2, P, B),
        collective(StepKind.ALL_GATHER, 2, S(0), B, shape=(3, 2)),
        transfer([0], [1], B, B),
    ],
)
def test_results_are_right_when_the_host_runs_ahead(step: BoxingStep) -> None:
    calls = run(step, 2, run_ahead=True, lag_s=0.05)

    assert all(calls)


def test_a_donated_shard_is_reduced_in_place_and_another_is_left_alone() -> None:
    step = collective(StepKind.ALL_REDUCE, 2, P, B)

    def job(rank: int, backend: NcclBackend) -> tuple[bool, bool, bool]:
        communicator = backend.communicator(rank)
        kept, given = torch.ones(4, 2), torch.ones(4, 2)
        fresh = communicator.collective(step, kept, tag="kept", deadline_s=30.0)
        same = communicator.collective(step, given, tag="given", deadline_s=30.0, donate=True)
        return (
            torch.equal(kept, torch.ones(4, 2)),
            fresh.data_ptr() != kept.data_ptr(),
            same.data_ptr() == given.data_ptr(),
        )

    assert Ranks(2).run(job) == [(True, True, True)] * 2


def test_work_reads_its_input_when_that_is_ready_and_not_before() -> None:
    step, ranks = collective(StepKind.ALL_REDUCE, 2, P, B), Ranks(2)
    given = [torch.zeros(4, 2), torch.zeros(4, 2)]

    def job(rank: int, backend: NcclBackend) -> torch.Tensor:
        ready = FakeEvent()

        def make_input() -> None:
            given[rank].fill_(1.0)
            ready.come.set()

        # As if torch's stream were still at work on the input.
        ranks.devices[rank].record = lambda: ready  # type: ignore[method-assign]
        threading.Timer(0.3, make_input).start()
        return backend.communicator(rank).collective(step, given[rank], tag="sum", deadline_s=30.0)

    for total in ranks.run(job):
        assert torch.equal(total, torch.full((4, 2), 2.0))
