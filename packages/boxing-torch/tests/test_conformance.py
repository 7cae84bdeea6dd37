from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from rank_pool import RankPool

from sbp_torch.testing.boxing import BoxingConformance, Job, Program, use_communicator


@pytest.mark.timeout(1800)
class TestTorchConformance(BoxingConformance):
    name = "torch"
    rank_counts = (2, 4, 6)

    @pytest.fixture(autouse=True)
    def _use_pool(self, pool: RankPool) -> None:
        self.pool = pool

    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        return self.pool.run(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> Sequence[Any]:
        return self.pool.run(num_ranks, job)
