"""Sessions: failures, interrupts, deadlines, and what is left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from actor_plans import (
    DATA,
    HANGS_S,
    PIPELINE,
    THREADS,
    OpeningBackend,
    SharedBackend,
    assert_states,
    at_gate,
    gate,
    operator,
    run_step,
    seen,
    start,
    training_step,
    wait_until,
    worker_threads,
)

from sbp_actor_runtime import session as session_module
from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.message import WorkerReport
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_core.errors import BoxingError, GraphError, RunError, SbpTypeError, SbpValueError
from sbp_core.testing.signals import hears_signals
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.testing.cases import compile_case, reference_run, shards_of
from sbp_torch.testing.failing_plans import REFUSAL, plan_with, refuse_large, too_large


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    """Close the gate, and see that a test leaves no thread of a worker."""
    gate.clear()
    at_gate.clear()
    yield
    gate.set()
    assert wait_until(lambda: not worker_threads()), worker_threads()


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", [DATA, THREADS])
def test_one_failing_rank_of_four_unblocks_the_others_and_is_named(name: str, rank: int) -> None:
    plan, actor = plan_with(compile_case(name), rank, refuse_large())
    step = training_step(name)
    with start(name, plan, deadline_s=HANGS_S) as session:
        run_step(session, name)
        before = session.state_dict()

        with pytest.raises(RunError, match=f"rank {rank} failed in actor '{actor}'") as caught:
            session.step(too_large(step.batches[1]), step.scalars)

        assert REFUSAL in str(caught.value)
        assert_states(session, before)


def test_the_op_that_failed_is_named_with_its_call() -> None:
    plan, _ = plan_with(compile_case(DATA), 1, refuse_large())
    step = training_step(DATA)
    with start(DATA, plan) as session, pytest.raises(RunError) as caught:
        session.step(too_large(step.batches[0]), step.scalars)

    assert re.match(r"op '.+': \w+ = \w*refuse_large\w*\(v\d+", caught.value.where[0])


def test_threads_end_with_the_failed_step_and_not_only_on_closing() -> None:
    plan, _ = plan_with(compile_case(THREADS), 1, refuse_large())
    step = training_step(THREADS)
    session = start(THREADS, plan)

    with pytest.raises(RunError):
        session.step(too_large(step.batches[0]), step.scalars)

    assert wait_until(lambda: not worker_threads()), worker_threads()
    session.close()


def test_a_failed_session_refuses_to_go_on_and_says_why() -> None:
    plan, actor = plan_with(compile_case(DATA), 2, refuse_large())
    step = training_step(DATA)
    with start(DATA, plan) as session:
        with pytest.raises(RunError):
            session.step(too_large(step.batches[0]), step.scalars)

        with pytest.raises(RunError, match="ended in a failed step") as caught:
            run_step(session, DATA)

    assert f"rank 2 failed in actor '{actor}'" in str(caught.value)
    assert "state_dict" in caught.value.todo


def test_a_closed_session_refuses_to_step() -> None:
    session = start(DATA)
    session.close()

    with pytest.raises(RunError, match="closed"):
        run_step(session, DATA)


def test_a_new_session_goes_on_from_the_states_of_a_failed_one() -> None:
    plan, _ = plan_with(compile_case(DATA), 2, refuse_large())
    step = training_step(DATA)
    with start(DATA, plan) as failed:
        run_step(failed, DATA, 0)
        with pytest.raises(RunError):
            failed.step(too_large(step.batches[1]), step.scalars)
        states = failed.state_dict()

    with start(DATA) as session:
        session.load_state_dict(states)
        losses = [run_step(session, DATA, 1), run_step(session, DATA, 2)]

    assert all(map(torch.equal, losses, reference_run(DATA)[0][1:]))


@pytest.mark.parametrize("name", [DATA, THREADS, PIPELINE])
def test_a_rank_that_hangs_is_named_when_the_deadline_passes(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "GRACE_S", 0.3)
    plan, actor = plan_with(compile_case(name), 2, operator("wait_at_gate"))
    session = start(name, plan, first_deadline_s=0.4)
    before = session.state_dict()

    with pytest.raises(RunError, match="did not arrive: 2") as caught:
        run_step(session, name)

    assert f"rank 2, thread 'compute': at '{actor}'" in str(caught.value)
    assert isinstance(caught.value.__cause__, BoxingError)
    assert_states(session, before)
    with caplog.at_level(logging.WARNING):
        session.close()
    assert "is abandoned" in caplog.text


def test_a_rank_that_fails_after_the_deadline_is_the_cause_and_not_whoever_waited() -> None:
    plan, actor = plan_with(compile_case(DATA), 2, operator("fail_after_gate"))
    with (
        start(DATA, plan, OpeningBackend(), first_deadline_s=0.3) as session,
        pytest.raises(RunError, match=f"rank 2 failed in actor '{actor}': late") as caught,
    ):
        run_step(session, DATA)

    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_the_first_deadline_is_for_the_first_step_only() -> None:
    plan, _ = plan_with(compile_case(DATA), 2, operator("wait_at_gate"))
    gate.set()
    settings = {"first_deadline_s": HANGS_S, "deadline_s": 0.2}
    with start(DATA, plan, OpeningBackend(), **settings) as session:
        run_step(session, DATA)
        gate.clear()

        with pytest.raises(RunError, match="did not arrive: 2"):
            run_step(session, DATA, 1)


def interrupt_at_gate() -> None:
    """Interrupt the process when an operator is at the gate."""
    assert at_gate.wait(HANGS_S)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", [DATA, THREADS])
@hears_signals()
def test_an_interrupt_in_the_middle_of_a_step_stops_the_workers(name: str) -> None:
    plan, _ = plan_with(compile_case(name), 1, operator("wait_at_gate"))
    session = start(name, plan, OpeningBackend())
    before = session.state_dict()
    threading.Thread(target=interrupt_at_gate).start()

    with pytest.raises(KeyboardInterrupt):
        run_step(session, name)
    session.close()

    assert not worker_threads()
    assert_states(session, before)


@hears_signals()
def test_an_interrupted_session_is_over_and_says_so() -> None:
    plan, _ = plan_with(compile_case(DATA), 1, operator("wait_at_gate"))
    with start(DATA, plan) as session:
        threading.Thread(target=interrupt_at_gate).start()
        with pytest.raises(KeyboardInterrupt):
            run_step(session, DATA)
        gate.set()

        with pytest.raises(RunError, match="ended in a failed step") as caught:
            run_step(session, DATA)

    assert "interrupted by KeyboardInterrupt" in str(caught.value)


def test_an_error_while_feeding_leaves_the_session_as_it_was() -> None:
    step = training_step(THREADS)
    with start(THREADS) as session:
        with pytest.raises(SbpTypeError, match="'features' is of type object"):
            session.step({**step.batches[0], "features": object()}, step.scalars)  # type: ignore[dict-item]
        losses = [run_step(session, THREADS, index) for index in range(3)]

    assert all(map(torch.equal, losses, reference_run(THREADS)[0]))


def test_twenty_sessions_leave_no_thread() -> None:
    before = threading.active_count()

    for _ in range(20):
        with start(THREADS) as session:
            assert len(worker_threads()) == 8
            run_step(session, THREADS)

    assert threading.active_count() == before


def test_a_session_lets_go_of_the_batch_when_the_step_is_over() -> None:
    step = training_step(DATA)
    batch = {name: value.clone() for name, value in step.batches[0].items()}
    kept = weakref.ref(batch["features"])
    with start(DATA) as session:
        session.step(batch, step.scalars)
        del batch

        # Parts of a batch are views, which keep the whole alive.
        assert wait_until(lambda: kept() is None)


@pytest.mark.parametrize("name", [PIPELINE, "two versions of parameters"])
def test_all_credits_are_back_when_a_step_is_over(name: str) -> None:
    with start(name) as session:
        for index in range(3):
            run_step(session, name, index)
        session.close()
        ends = []
        for worker in session.workers.values():
            while not worker.inbox.empty():
                message = worker.inbox.get()
                if hasattr(message, "register"):
                    worker._handle(message)
            ends += worker.outputs.values()

    assert ends
    for end in ends:
        assert set(end.acknowledged.values()) == {end.filled - end.initial}, end.name


def test_the_main_thread_keeps_its_own_number_of_threads() -> None:
    before = torch.get_num_threads()
    with start(DATA, threads_per_rank=2) as session:
        run_step(session, DATA)

        assert torch.get_num_threads() == before


def test_operators_may_use_as_many_threads_as_the_settings_say() -> None:
    plan, _ = plan_with(compile_case(DATA), 1, operator("count_threads"))
    seen.clear()
    with start(DATA, plan, threads_per_rank=3) as session:
        run_step(session, DATA)

    assert seen == [3]


@pytest.mark.parametrize(("of_torch", "of_a_rank"), [(3, 1), (4, 1), (11, 2)])
def test_the_ranks_of_a_process_share_the_threads_that_pytorch_has(
    of_torch: int, of_a_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)

    with start(DATA) as session:  # of four ranks
        found = {worker.num_threads for worker in session.workers.values()}

    assert found == {of_a_rank}


def test_an_operator_that_torch_lacks_is_refused_before_a_thread_starts() -> None:
    plan, _ = plan_with(compile_case(DATA), 3, "nobodys.operator.default")
    backend = LocalBackend()

    with pytest.raises(GraphError, match=r"nobodys\.operator"):
        start(DATA, plan, backend)

    assert not worker_threads()
    with pytest.raises(BoxingError, match="closed"):
        backend.open([0])


def test_bad_states_close_the_backend() -> None:
    backend = LocalBackend()

    with pytest.raises(SbpValueError):
        ActorRuntime(ActorConfig()).start(compile_case(DATA), {}, backend)

    with pytest.raises(BoxingError, match="closed"):
        backend.open([0])


def test_threads_that_cannot_start_take_the_others_down(monkeypatch: pytest.MonkeyPatch) -> None:
    original = threading.Thread.start

    def refuse_the_last(thread: threading.Thread) -> None:
        if thread.name == "sbp rank 3 compute":
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_last)

    with pytest.raises(RuntimeError, match="can't start"):
        start(DATA)

    assert wait_until(lambda: not worker_threads())


@pytest.mark.parametrize("name", [DATA, PIPELINE])
def test_two_processes_that_each_run_two_ranks_equal_one(name: str) -> None:
    whole, plan, step = LocalBackend(), compile_case(name), training_step(name)
    runtime = ActorRuntime(ActorConfig(first_deadline_s=30.0, deadline_s=30.0))
    sessions = [
        runtime.start(plan, step.states, SharedBackend(whole, ranks)) for ranks in ([0, 1], [2, 3])
    ]
    with ThreadPoolExecutor(2) as processes:
        for batch in step.batches:
            list(processes.map(lambda one: one.step(batch, step.scalars), sessions))  # noqa: B023

    found = {}
    for session, ranks in zip(sessions, ([0, 1], [2, 3]), strict=True):
        here = replace(plan, ranks=tuple(part for part in plan.ranks if part.rank in ranks))
        found |= shards_of(session, here)
        session.close()
    for place, value in reference_run(name)[1].items():
        assert torch.equal(torch.as_tensor(found[place]), torch.as_tensor(value)), place


def test_an_interrupt_while_states_are_taken_over_leaves_all_ranks_at_one_step() -> None:
    # New states take force by one assignment: the store's old values are not changed in place.
    with start(DATA) as session:
        old = {rank: dict(values) for rank, values in session.store.values.items()}
        held = session.store.values
        run_step(session, DATA)

    assert session.store.values is not held
    assert all(held[rank][name] is value for rank in old for name, value in old[rank].items())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_of_results_that_differ_that_of_the_lowest_rank_counts(order: tuple[int, ...]) -> None:
    with start(DATA) as session:
        reports = [
            WorkerReport(thread=(rank, "compute"), results={"loss": torch.tensor(float(rank))})
            for rank in order
        ]

        assert session._commit(reports)["loss"] == 0
