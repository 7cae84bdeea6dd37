"""A few kills of each backend; `nox -s exhaustive -- kills` does many."""

import random
from pathlib import Path

import pytest

from forked import can_fork
from kills.saves import Trials
from kills.training import Moment, run_training_trial
from kills.trial import WAYS, How, run_trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("local (sbp)", How.EXCEPTION),
        ("torch (sbp)", How.SIGKILL),
        ("torch (torchrun)", How.EXCEPTION),
        ("mpi (sbp)", How.SIGSTOP),
        ("mpi (mpiexec)", How.EXIT),
        ("nccl (sbp)", How.EXCEPTION),
        ("torch (torchrun)", How.OS_EXIT_0),
        ("mpi (mpiexec)", How.EXIT_0),
    ],
    ids=str,
)
def test_when_a_rank_is_killed_it_is_named_and_all_come_down(way: str, how: How) -> None:
    outcome = run_trial(
        WAYS[way], how, num_ranks=3, deadline_s=3.0, draw=random.Random(f"{way} {how}")
    )

    assert not outcome.faults, "\n".join(outcome.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "how", "moment", "failing_rank"),
    [
        ("spawn", How.EXCEPTION, Moment.UPDATE, 1),
        ("spawn", How.SIGSTOP, Moment.FORWARD, 0),
        ("spawn", How.SIGKILL, Moment.WRITING, 1),
        ("mpiexec", How.SIGKILL, Moment.FIRST_STEP, 1),
        ("torchrun", How.OS_EXIT_0, Moment.FIRST_STEP, 1),
        ("spawn", How.EXIT_0, Moment.UPDATE, 0),
    ],
    ids=str,
)
def test_when_a_rank_that_trains_is_killed_it_is_named_and_the_others_save_what_is_left(
    way: str, how: How, moment: Moment, failing_rank: int
) -> None:
    outcome = run_training_trial(way, how, moment, failing_rank=failing_rank)

    assert not outcome.faults, "\n".join(outcome.lines)


@pytest.mark.slow
@pytest.mark.skipif(not can_fork(), reason="threads survive no fork: OMP_NUM_THREADS=1")
def test_when_a_process_that_saves_is_killed_the_newest_checkpoint_is_whole(
    tmp_path: Path,
) -> None:
    outcomes = list(Trials(tmp_path, random.Random(0)).run(4))

    assert not [fault for outcome in outcomes for fault in outcome.faults]
    assert outcomes[-1].found_step > 0
