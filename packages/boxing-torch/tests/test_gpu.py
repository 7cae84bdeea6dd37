"""NCCL, on machines that have GPUs: one rank on one GPU, and the conformance suite on all."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch.distributed import HashStore

from sbp_boxing_torch.backend import TorchBackend
from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_boxing_torch.rendezvous import TorchWorld
from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P
from sbp_torch.testing.boxing import BoxingConformance, Job, Program, use_communicator

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device is visible"),
]


def test_a_group_of_one_rank_reduces_over_nccl() -> None:
    mesh = Placement([0], device="cuda")
    step = BoxingStep(
        kind=StepKind.ALL_REDUCE,
        shape=(4,),
        dtype="float32",
        source=(mesh, NdSbp(P)),
        target=(mesh, NdSbp(B)),
        axes=(0,),
        size_bytes=0,
    )
    backend = TorchBackend(
        TorchBoxingConfig(device="cuda:0"), world=TorchWorld(rank=0, size=1, store=HashStore())
    )
    backend.open([0])
    value = torch.arange(4.0, device="cuda:0")

    made = backend.communicator(0).collective(step, value, tag="test", deadline_s=60.0)

    assert torch.equal(made, value)
    backend.close()


class TestNcclConformance(BoxingConformance):
    name = "torch, nccl"
    device = "cuda"
    rank_counts = tuple(count for count in (1, 2, 4, 6, 8) if count <= max(1, NUM_GPUS))

    @pytest.fixture(autouse=True)
    def _start_pool(self) -> Iterator[None]:
        self.pool = RankPool("cuda")
        yield
        self.pool.close()

    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        return self.pool.run(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> Sequence[Any]:
        return self.pool.run(num_ranks, job)
