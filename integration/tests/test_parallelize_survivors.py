"""What a process saves of a step of `parallelize` whose other process has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lost_rank
import pytest
import torch
from torch import nn

from sbp_launch import parallelize

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def told(folder: Path, planner: str, *others: str) -> str:
    """Return what the program has written, under torchrun."""
    command = [*TORCHRUN, str(Path(lost_rank.__file__)), str(folder), planner, *others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_that_is_left_with_all_states_saves_them(tmp_path: Path) -> None:
    found = told(tmp_path, "manual/data_parallel")

    assert "saved behind step 2" in found, found
    torch.manual_seed(0)
    model = nn.Linear(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {"x": torch.ones(2, 64)}
    with parallelize(model, lost_rank.squares, given, optimizer) as step:
        for _ in range(2):
            step(given)
        wanted = step.state_dict()
        step.load(tmp_path)
        assert step.steps_done == 2
        torch.testing.assert_close(step.state_dict(), wanted)


@pytest.mark.exhaustive
def test_where_a_part_of_the_states_is_lost_its_holder_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, "manual/zero")

    assert "not saved: rank 1 alone held a part of " in found, found
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.slow
def test_without_the_agent_of_torchrun_a_process_with_all_states_saves_them(tmp_path: Path) -> None:
    found = told(tmp_path, "manual/data_parallel", "agent")

    assert "saved behind step 2" in found, found
    assert list(tmp_path.glob("step-*"))


@pytest.mark.exhaustive
def test_without_the_agent_of_torchrun_the_cause_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, "manual/zero", "agent")

    assert "not saved: " in found, found
    assert "the process that hosts the store cannot be reached" in found
