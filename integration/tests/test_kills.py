"""A few kills of each backend; `nox -s exhaustive -- kills` does many."""

import random

import pytest

from kills.training import Moment, run_training_trial
from kills.trial import WAYS, How, run_trial


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("local (sbp)", How.EXCEPTION),
        ("torch (sbp)", How.SIGKILL),
        ("torch (torchrun)", How.EXCEPTION),
        ("mpi (sbp)", How.SIGSTOP),
        ("mpi (mpiexec)", How.EXIT),
        ("nccl (sbp)", How.EXCEPTION),
    ],
    ids=str,
)
def test_when_a_rank_is_killed_it_is_named_and_all_come_down(way: str, how: How) -> None:
    outcome = run_trial(
        WAYS[way], how, num_ranks=3, deadline_s=3.0, draw=random.Random(f"{way} {how}")
    )

    assert not outcome.faults, "\n".join(outcome.lines)


@pytest.mark.parametrize(
    ("way", "how", "moment", "failing_rank"),
    [
        ("spawn", How.EXCEPTION, Moment.UPDATE, 1),
        ("spawn", How.SIGSTOP, Moment.FORWARD, 0),
        ("mpiexec", How.SIGKILL, Moment.FIRST_STEP, 1),
    ],
    ids=str,
)
def test_when_a_rank_that_trains_is_killed_it_is_named_and_all_come_down(
    way: str, how: How, moment: Moment, failing_rank: int
) -> None:
    outcome = run_training_trial(way, how, moment, failing_rank=failing_rank)

    assert not outcome.faults, "\n".join(outcome.lines)
