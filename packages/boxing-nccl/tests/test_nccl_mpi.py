"""The backend `nccl` among processes of MPI, which carries its entries and the fake GPUs' data."""

from functools import partial
from typing import Any

import pytest
import torch
from steps import collective, expected, parts, transfer

from sbp_boxing_nccl.configs import NcclBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_boxing_nccl.nccl.nccl_backend import NcclBackend
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import BoxingError
from sbp_core.sbp import B, P, S

STEPS = (
    collective(StepKind.ALL_REDUCE, 4, P, B, dtype="bool"),
    collective(StepKind.REDUCE_SCATTER, 4, P, S(0), shape=(8, 3)),
    collective(StepKind.REDUCE_SCATTER, 4, P, S(0), shape=(7, 3)),
    collective(StepKind.ALL_GATHER, 4, S(1), B, shape=(3, 8), dtype="bfloat16"),
    collective(StepKind.ALL_GATHER, 4, S(0), B, shape=(3, 2)),
    collective(StepKind.ALL_TO_ALL, 4, S(0), S(1), shape=(5, 6), dtype="int64"),
    transfer([0, 1], [2, 3], S(0), B, shape=(5, 2)),
)


def given_parts(step: BoxingStep) -> dict[int, torch.Tensor]:
    values = torch.arange(torch.Size(step.shape).numel()).reshape(step.shape)
    return parts(step, values.to(getattr(torch, step.dtype)))


def open_over_mpi(rank: int) -> NcclBackend:
    """Open the backend on all processes, which find each other as they would with GPUs."""
    from fake_device import FakeDevice
    from fake_network import MpiNetwork
    from mpi4py import MPI

    device = FakeDevice(MpiNetwork(MPI.COMM_WORLD.Dup()), rank)
    backend = NcclBackend(NcclBoxingConfig(connect_timeout_s=20.0), device=device)
    backend.open(range(4))
    return backend


def run_steps(rank: int, _: MpiBackend) -> list[list[Any]]:
    backend, results = open_over_mpi(rank), []
    communicator = backend.communicator(rank)
    for number, step in enumerate(STEPS):
        mine, result, tag = given_parts(step).get(rank), None, f"step {number}"
        if step.kind is not StepKind.TRANSFER:
            assert mine is not None
            result = communicator.collective(step, mine, tag=tag, deadline_s=30.0)
        elif mine is not None:
            communicator.send(step, mine, tag=tag, deadline_s=30.0)
        else:
            result = communicator.receive(step, None, tag=tag, deadline_s=30.0)
        results.append([] if result is None else result.tolist())
    backend.close()
    return results


def test_every_kind_of_step_runs_among_processes(pool: Any) -> None:
    answers = pool.run(4, run_steps)

    for number, step in enumerate(STEPS):
        for rank, result in expected(step, given_parts(step)).items():
            assert answers[rank][number] == result.tolist(), f"{step} on rank {rank}"


def without_gpu(rank: int, _: MpiBackend) -> str:
    backend = NcclBackend(NcclBoxingConfig(connect_timeout_s=20.0))
    try:
        backend.open(range(4))
    except BoxingError as error:
        return str(error)
    return "opened"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_processes_without_a_gpu_say_so(pool: Any) -> None:
    for said in pool.run(4, without_gpu):
        assert "boxing=nccl needs an NVIDIA GPU" in said
        assert "boxing=mpi" in said


def lose_a_rank(rank: int, _: MpiBackend) -> str:
    import time

    backend = open_over_mpi(rank)
    step = STEPS[0]
    communicator = backend.communicator(rank)
    reduce = partial(communicator.collective, step, given_parts(step)[rank])
    reduce(tag="first", deadline_s=30.0)
    said = ""
    if rank == 2:
        time.sleep(2.0)
    else:
        try:
            reduce(tag="second", deadline_s=1.0)
        except BoxingError as error:
            said = str(error)
    backend.close()
    return said


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_among_processes(pool: Any) -> None:
    answers = pool.run(4, lose_a_rank)

    for rank in (0, 1, 3):
        assert "'second'" in answers[rank] and "did not arrive: 2" in answers[rank], answers[rank]
