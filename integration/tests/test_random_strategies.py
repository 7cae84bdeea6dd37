"""Any plan computes what one device computes, where each rank is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STRATEGIES = Path(__file__).parent.parent / "strategies.py"

COMMANDS = {
    "torch": ["torchrun", "--nproc-per-node"],
    "mpi": ["mpiexec", "--oversubscribe", "--bind-to", "none", "-n"],
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def told_by(boxing: str, num_ranks: int, seed: int, count: int) -> str:
    program, *options = COMMANDS[boxing]
    python = [sys.executable] if boxing == "mpi" else []
    command = [str(Path(sys.executable).with_name(program)), *options, str(num_ranks), *python]
    ended = subprocess.run(
        [*command, str(STRATEGIES), str(seed), str(count)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("boxing", COMMANDS)
def test_random_strategies_compute_what_one_device_computes_over(boxing: str) -> None:
    assert f"8 plans of 2 ranks over {boxing}, " in told_by(boxing, 2, 1, 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("boxing", COMMANDS)
def test_very_many_strategies_compute_what_one_device_computes_over(
    boxing: str, num_ranks: int
) -> None:
    assert f"150 plans of {num_ranks} ranks" in told_by(boxing, num_ranks, num_ranks, 150)
