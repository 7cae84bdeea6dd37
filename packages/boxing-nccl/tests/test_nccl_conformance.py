from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from thread_ranks import Ranks

from sbp_torch.testing.boxing import BoxingConformance, Job, Program, use_communicator


@pytest.mark.timeout(1800)
class TestNcclConformance(BoxingConformance):
    """The code of the backend `nccl` on CPUs, over fake GPUs."""

    name = "nccl (fake)"
    rank_counts = (2, 4, 6)

    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        return self.run_backends(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> Sequence[Any]:
        return Ranks(num_ranks).run(job)
