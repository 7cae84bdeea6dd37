"""One worker alone: what it waits for, what it sends, and how it stops."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import pytest
import torch
from actor_plans import HANGS_S, PIPELINE, gate, operator, training_step, wait_until

from sbp_actor_runtime.message import (
    Acknowledge,
    FilledRegister,
    Message,
    StepOrder,
    ThreadId,
    WorkerReport,
)
from sbp_actor_runtime.worker import PATIENCE, ActorThread, Stopped
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError
from sbp_core.sbp import local_shape
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.feeding import Feeder
from sbp_torch.runtime.store import StateStore
from sbp_torch.testing.cases import compile_case
from sbp_torch.testing.failing_plans import plan_with


class Alone:
    """The compute thread of rank 0, with nobody at the other end of its messages."""

    def __init__(
        self, name: str = PIPELINE, plan: PhysicalPlan | None = None, *, starts: bool = True
    ) -> None:
        self.step = training_step(name)
        self.plan = plan or compile_case(name)
        self.sent: SimpleQueue[tuple[ThreadId, Message]] = SimpleQueue()
        self.reports: SimpleQueue[WorkerReport] = SimpleQueue()
        backend = LocalBackend()
        backend.open([part.rank for part in self.plan.ranks])
        self.worker = ActorThread(
            self.plan,
            (0, "compute"),
            [0],
            backend.communicator(0),
            lambda thread, message: self.sent.put((thread, message)),
            self.reports.put,
            1,
            threading.Lock(),
            StateStore(self.plan, [0]).device,
        )
        if starts:
            self.worker.os_thread.start()

    def order(self, deadline_s: float) -> None:
        store = StateStore(self.plan, [0])
        store.load(self.step.states)
        fed = Feeder(self.plan, [0]).feed(self.step.batches[0], self.step.scalars)
        self.worker.inbox.put(StepOrder(0, store.values[0], fed[0], deadline_s))

    def end(self) -> None:
        self.worker.stop()
        self.worker.os_thread.join(30.0)
        assert not self.worker.os_thread.is_alive()


def all_messages(alone: Alone) -> list[tuple[ThreadId, Message]]:
    found = []
    while True:
        try:
            found.append(alone.sent.get(timeout=0.5))
        except Empty:
            return found


def test_a_step_that_was_ordered_before_the_stop_is_reported() -> None:
    # The session waits for the report of every worker that it gave an order.
    alone = Alone(starts=False)
    alone.order(deadline_s=60.0)
    alone.worker.stop()

    alone.worker.os_thread.start()
    report = alone.reports.get(timeout=30.0)
    alone.end()

    assert report.stopped


@pytest.mark.parametrize("has_overwritten", [False, True])
def test_a_thread_that_was_stopped_begins_no_update(has_overwritten: bool) -> None:
    worker = Alone(starts=False).worker
    worker.has_overwritten = has_overwritten
    worker.stop()

    with pytest.raises(Stopped):
        worker._begin_update(StepOrder(0, {}, [], 60.0))

    assert worker.has_overwritten == has_overwritten


def test_a_step_that_was_given_up_begins_no_update_and_one_that_began_is_not_given_up() -> None:
    order = StepOrder(0, {}, [], 60.0)
    workers = [Alone(starts=False).worker for _ in range(2)]

    assert order.commitment.try_abort()
    for worker in workers:
        with pytest.raises(Stopped):
            worker._begin_update(order)
        assert not worker.has_overwritten

    later = StepOrder(1, {}, [], 60.0)
    workers[0]._begin_update(later)
    assert workers[0].has_overwritten
    assert not later.commitment.try_abort()


def test_a_deadline_that_passes_names_what_was_awaited() -> None:
    alone = Alone()

    alone.order(deadline_s=0.05)
    report = alone.reports.get(timeout=30.0)
    alone.end()

    assert isinstance(report.error, RunError)
    assert "has waited 0.1 s for data in register" in str(report.error)
    assert "rank 0, thread compute" in str(report.error)
    assert report.actor
    assert not report.stopped


def test_a_message_for_another_thread_goes_through_its_inbox() -> None:
    alone = Alone()

    alone.order(deadline_s=60.0)
    messages = all_messages(alone)
    alone.end()

    requests = [(thread, m) for thread, m in messages if isinstance(m, FilledRegister)]
    assert requests, "the boxing thread was asked for nothing"
    assert {thread for thread, _ in requests} == {(0, "boxing")}
    assert all(isinstance(v, torch.Tensor) for _, m in requests for v in m.values.values())


def test_a_filling_is_acknowledged_to_the_thread_that_made_it() -> None:
    alone = Alone()
    part = alone.plan.by_rank[0]
    alone.order(deadline_s=60.0)
    all_messages(alone)
    waits_for = alone.worker.current_actor
    (answered,) = (
        register
        for register in part.inputs_of[waits_for]
        if part.by_name[register.producer].thread == "boxing"
    )
    actor = part.by_name[answered.producer]
    step = alone.plan.steps[actor.step]

    mesh, sbp = step.target
    shape = local_shape(step.shape, sbp, mesh.mesh_shape, mesh.coordinate(0))
    value = torch.zeros(shape, dtype=torch.float64)
    for consumer in answered.consumers:
        filling = dict.fromkeys(answered.keys, value)
        alone.worker.inbox.put(FilledRegister(answered.name, consumer, filling))
    messages = all_messages(alone)
    alone.end()

    acknowledged = [(thread, m) for thread, m in messages if isinstance(m, Acknowledge)]
    assert ((0, "boxing"), Acknowledge(answered.name, answered.consumers[0])) in acknowledged


def test_stopping_ends_a_thread_that_waits_in_the_middle_of_a_step() -> None:
    alone = Alone()
    alone.order(deadline_s=HANGS_S)
    assert wait_until(lambda: bool(alone.worker.current_actor))

    alone.end()

    report = alone.reports.get(timeout=30.0)
    assert report.stopped
    assert report.error is not None


def test_a_thread_that_waits_for_nobody_stops_after_the_firing_it_is_in() -> None:
    gate.clear()
    plan, actor = plan_with(compile_case("one rank"), 0, operator("wait_at_gate"))
    alone = Alone("one rank", plan)
    alone.order(deadline_s=60.0)
    assert wait_until(lambda: alone.worker.current_actor == actor)

    alone.worker.stop()
    gate.set()
    report = alone.reports.get(timeout=30.0)
    alone.end()

    assert report.stopped
    assert not report.new_states


def test_stopping_ends_a_thread_that_has_nothing_to_do() -> None:
    alone = Alone()

    alone.end()

    with pytest.raises(Empty):
        alone.reports.get(timeout=0.01)


def test_whoever_waits_for_a_rank_speaks_before_whoever_waits_for_a_thread() -> None:
    assert PATIENCE > 1
