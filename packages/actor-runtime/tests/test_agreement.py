"""Processes that run different plans, that compare every step, or of which one gives up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from actor_plans import DATA, PIPELINE, SharedBackend, run_step, start

from sbp_actor_runtime.session import ActorSession
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import RunError
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.testing.cases import compile_case, reference_run


def sessions_of(plans: Sequence[PhysicalPlan]) -> list[ActorSession]:
    """Return the sessions of two processes of two ranks each."""
    whole = LocalBackend()
    return [
        start(DATA, plan, SharedBackend(whole, ranks))
        for plan, ranks in zip(plans, ([0, 1], [2, 3]), strict=True)
    ]


def test_processes_with_different_plans_run_no_step_and_name_both() -> None:
    plan = compile_case(DATA)
    other = replace(plan, planner="another")
    sessions = sessions_of([plan, other])

    def outcome(session: ActorSession) -> str:
        with pytest.raises(RunError) as caught:
            run_step(session, DATA)
        return str(caught.value)

    with ThreadPoolExecutor(2) as processes:
        for text in processes.map(outcome, sessions):
            assert f"ranks 0, 1 have {plan.hash}, ranks 2, 3 have {other.hash}" in text
    for session in sessions:
        assert session.steps_done == 0
        with pytest.raises(RunError, match="ended in a failed step"):
            run_step(session, DATA)
        session.close()


def test_a_process_that_never_comes_is_named_at_the_first_deadline() -> None:
    plan, whole = compile_case(DATA), LocalBackend()
    with (
        start(DATA, plan, SharedBackend(whole, [0, 1]), first_deadline_s=0.2) as session,
        pytest.raises(RunError, match=r"'agreement on the plan' waited 0.2 s.*arrive: 2, 3"),
    ):
        run_step(session, DATA)


@pytest.mark.parametrize("name", [DATA, PIPELINE])
def test_with_fingerprints_a_run_gives_the_same(name: str) -> None:
    with start(name, debug_fingerprints=True) as session:
        losses = [run_step(session, name, index) for index in range(2)]

    assert all(map(torch.equal, losses, reference_run(name)[0]))


def test_an_error_between_steps_ends_the_other_processes() -> None:
    plan = compile_case(DATA)
    first, second = sessions_of([plan, plan])

    with pytest.raises(ValueError, match="bad batch"), first:
        raise ValueError("bad batch")

    with pytest.raises(RunError, match="bad batch"):
        run_step(second, DATA)
    second.close()
