from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from rank_pool import RankPool

from sbp_boxing_torch.backend import TorchBackend
from sbp_core.testing.boxing import BoxingConformance, Program


def run_program(rank: int, backend: TorchBackend, program: Program) -> Any:
    return program(rank, backend.communicator(rank))


class TestTorchBackend(BoxingConformance):
    dtypes = ("float32", "float64", "int64", "bfloat16")

    @pytest.fixture(autouse=True)
    def _use_pool(self, pool: RankPool) -> None:
        self.pool = pool

    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        return self.pool.run(num_ranks, partial(run_program, program=program))
