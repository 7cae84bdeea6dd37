"""A rank of real processes that fails before the commit of a step, or behind it: what is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commit_rank import BAD_STEP

from sbp_core.plugins import discover
from sbp_core.processes import supervise

_PROGRAM = Path(__file__).with_name("commit_rank.py")


def _told(backend: str, how: str, *places: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what the sessions of the ranks say, by place and rank."""
    command = [sys.executable, str(_PROGRAM), backend, how, *places]
    specs = discover(strict=True).make("boxing", backend, {}).launch_specs(2, command)
    lines: list[str] = []
    supervise(specs, on_line=lambda line: lines.append(line.text), timeout_s=240.0)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {(one["place"], one["rank"]): one for one in found}


def _check_before(told: dict[str, Any]) -> None:
    assert told["steps_done"] == BAD_STEP
    assert told["states"] == f"of step {BAD_STEP}"
    assert "after the commit" not in told["said"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "mpi"])
def test_a_rank_that_raises_tears_no_states_before_the_commit_and_is_named_behind_it(
    backend: str,
) -> None:
    told = _told(backend, "raise", "forward", "update")

    for rank in (0, 1):
        _check_before(told["forward", rank])
        assert "it fails here" in told["forward", rank]["said"]
        late = told["update", rank]
        # Rank 0 is through with the step when rank 1 fails; both know that no states are whole.
        assert late["steps_done"] == BAD_STEP + (rank == 0)
        assert "the states belong to two steps" in late["states"]
        assert f"rank 1 failed after the commit of step {BAD_STEP}" in late["states"]
        assert f"rank 1 failed after the commit of step {BAD_STEP}" in late["next_step"]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_its_update_leaves_the_states_of_the_other() -> None:
    told = _told("torch", "kill", "update")["update", 0]

    # They are whole, and no other rank has any.
    assert told["steps_done"] == BAD_STEP + 1
    assert told["states"] == f"of step {BAD_STEP + 1}"
    assert "rank 1" in told["next_step"]
