"""The second process solves one task after the other, and can be ended."""

from __future__ import annotations

import time
from math import inf

import pytest

from sbp_planner.choice.compact import compacted
from sbp_planner.choice.iopddl.synthetic import transformer_problem
from sbp_planner.choice.large.worker import SolverProcess, Task
from sbp_planner.choice.program import ProgramResult, solve_program
from sbp_planner.choice.reduce import reduce_problem


def result_of(worker: SolverProcess) -> ProgramResult:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for message in worker.messages():
            if isinstance(message, ProgramResult):
                return message
        assert worker.alive
        time.sleep(0.01)
    raise AssertionError("no result in a minute")


@pytest.mark.slow
def test_tasks_are_solved_one_after_the_other():
    worker = SolverProcess()
    try:
        for seed in (1, 2):
            compact, _ = compacted(reduce_problem(transformer_problem(3, seed=seed), -inf))
            worker.submit(Task(compact=compact, seconds=30, gap=0.0, start=None))

            result = result_of(worker)

            assert not worker.running
            assert result.optimal
            expected = solve_program(compact, inf)
            assert compact.total(result.values) == pytest.approx(compact.total(expected.values))
    finally:
        worker.end()
    assert not worker.alive


def test_a_process_that_ends_is_told():
    worker = SolverProcess()
    worker._process.kill()
    worker._process.wait()
    until = time.monotonic() + 30

    while worker.alive and time.monotonic() < until:
        worker.messages()
        time.sleep(0.01)

    assert not worker.alive
    worker.end()
