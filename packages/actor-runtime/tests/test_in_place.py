"""States that new values overwrite: what a failed step leaves, and what is said of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from actor_plans import (
    DATA,
    SharedBackend,
    assert_states,
    gate,
    operator,
    run_step,
    start,
    training_step,
    wait_until,
)

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_core.compile import COMMIT
from sbp_core.compile.actors import Compute, Instruction
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import PlanError, RunError
from sbp_core.graph.ir import InputKind, Phase, Rate, Ref
from sbp_core.memory import predict_memory
from sbp_core.plan_check import check
from sbp_core.testing.signals import hears_signals
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.testing.cases import compile_case


def _in_place() -> PhysicalPlan:
    return compile_case(DATA, in_place_states=True)


def _beside() -> PhysicalPlan:
    return compile_case(DATA, in_place_states=False)


def _failing_late(plan: PhysicalPlan) -> PhysicalPlan:
    """Let rank 0 fail in a last actor, after its states were overwritten."""
    part = plan.by_rank[0]
    last = next(actor for actor in part.actors if isinstance(actor, Compute))
    state = next(slot.name for slot in part.slots if slot.sbp is not None)
    call = Instruction(op=operator("fail_after_gate"), args=(Ref(state),), outputs=("bad",))
    late = replace(
        last, name="late", rate=Rate.STEP, inputs=(), reads=(state,), outputs=(), emits=(),
        writes=(), in_place=(), instructions=(call,),
    )  # fmt: skip
    order = (*part.orders["compute"], ("late", 0))
    orders = {**part.orders, "compute": order}
    changed = replace(part, actors=(*part.actors, late), orders=orders)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


def test_overwritten_states_keep_their_memory_and_their_values() -> None:
    with start(DATA, _in_place()) as session, start(DATA, _beside()) as usual:
        names = {n for a in session.plan.ranks[0].actors for n in a.in_place}
        before = {name: session.shard(name, 0).data_ptr() for name in names}

        losses = [[run_step(s, DATA, i) for i in range(2)] for s in (session, usual)]

        assert names
        assert {name: session.shard(name, 0).data_ptr() for name in names} == before
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
        wanted = usual.state_dict()
        assert all(torch.equal(v, wanted[n]) for n, v in session.state_dict().items())


def test_a_step_that_fails_late_tears_the_states_and_says_so() -> None:
    gate.set()
    with start(DATA, _failing_late(_in_place())) as session:
        with pytest.raises(RunError, match="late and wrong") as caught:
            run_step(session, DATA)

        assert "overwritten already" in caught.value.todo
        with pytest.raises(RunError, match="the states belong to two steps"):
            session.state_dict()


def _failing_behind_commit(plan: PhysicalPlan) -> PhysicalPlan:
    """Let rank 0 fail in an actor between the commit and its update."""
    failing = _failing_late(plan)
    part = failing.by_rank[0]
    *order, late = part.orders["compute"]
    order.insert([name for name, _ in order].index(COMMIT) + 1, late)
    changed = replace(part, orders={**part.orders, "compute": tuple(order)})
    return replace(failing, ranks=tuple(changed if p is part else p for p in failing.ranks))


def test_a_rank_that_fails_behind_the_commit_tears_the_states_of_all_processes() -> None:
    gate.clear()
    plan, whole = _failing_behind_commit(_in_place()), LocalBackend()
    first, others = (start(DATA, plan, SharedBackend(whole, ranks)) for ranks in ([0], [1, 2, 3]))

    with ThreadPoolExecutor(1) as process:
        failing = process.submit(run_step, first, DATA)
        run_step(others, DATA)  # they are through with the step
        pieces = list(others.pieces())
        gate.set()
        with pytest.raises(RunError, match="rank 0 failed after the commit of step 0"):
            failing.result()

    assert pieces
    for session in (first, others):
        with pytest.raises(RunError, match="the states belong to two steps"):
            session.pieces()
        session.close()


def test_without_overwriting_a_late_failure_leaves_the_states() -> None:
    gate.set()
    with start(DATA, _failing_late(_beside())) as session:
        with pytest.raises(RunError, match="late and wrong") as caught:
            run_step(session, DATA)

        assert "state_dict() still gives them" in caught.value.todo
        assert session.state_dict().keys() == training_step(DATA).states.keys()


def _waiting_writer(plan: PhysicalPlan) -> PhysicalPlan:
    """Let the segment of rank 0 that overwrites states wait at the gate first."""
    part = plan.by_rank[0]
    state = next(slot.name for slot in part.slots if slot.sbp is not None)
    call = Instruction(op=operator("wait_at_gate"), args=(Ref(state),), outputs=("waited",))
    actors = tuple(
        replace(actor, instructions=(call, *actor.instructions), reads=(state, *actor.reads))
        if actor.in_place and state not in actor.reads
        else replace(actor, instructions=(call, *actor.instructions))
        if actor.in_place
        else actor
        for actor in part.actors
    )
    changed = replace(part, actors=actors)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


@hears_signals()
def test_an_interrupt_while_states_are_overwritten_waits_for_the_step_and_the_session_goes_on() -> (
    None
):
    gate.clear()
    with start(DATA, _in_place()) as usual:
        wanted = [run_step(usual, DATA, index) for index in range(2)]
        states = usual.state_dict()
    with start(DATA, _waiting_writer(_in_place())) as session:

        def interrupt() -> None:
            writers = [worker for (rank, _), worker in session.workers.items() if rank == 0]
            assert wait_until(lambda: any(worker.has_overwritten for worker in writers))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # in which it is heard
            gate.set()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            run_step(session, DATA)
        interrupting.join()

        assert session.steps_done == 1
        assert torch.equal(run_step(session, DATA, 1), wanted[1])
        assert_states(session, states)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_interrupt_before_new_states_take_force_mixes_no_steps(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(reports: object) -> None:
        raise KeyboardInterrupt

    with start(DATA, _in_place() if in_place else _beside()) as session:
        monkeypatch.setattr(session, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_step(session, DATA)

        if in_place:
            with pytest.raises(RunError, match="the states belong to two steps"):
                session.state_dict()
        else:
            assert_states(session, training_step(DATA).states)


def test_the_peak_is_as_predicted_and_lower() -> None:
    plan = compile_case("data parallel", in_place_states=True)
    step = training_step("data parallel")
    meter = MemoryMeter(plan)
    runtime = ActorRuntime(ActorConfig())

    with (
        runtime.start(plan, step.states, meter.backend(LocalBackend())) as session,
        meter.watching(session),
    ):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    usual = predict_memory(compile_case("data parallel", in_place_states=False))
    for rank, memory in predict_memory(plan).ranks.items():
        assert meter.peak(rank) == memory.peak
        assert memory.peak < usual.ranks[rank].peak


def _looking_beside(plan: PhysicalPlan) -> PhysicalPlan:
    """Let rank 0 look at a parameter on a thread of its own, once the gate is open."""
    part = plan.by_rank[0]
    state = next(slot.name for slot in part.slots if slot.kind is InputKind.PARAMETER)
    calls = (
        Instruction(op=operator("wait_at_gate"), args=(Ref(state),), outputs=("waited",)),
        Instruction(op="aten.sum.default", args=(Ref(state),), outputs=("seen",)),
    )
    look = Compute(
        name="look", stage=0, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread="beside",
        reads=(state,), emits=(("seen", "seen"),), instructions=calls,
    )  # fmt: skip
    orders = {**part.orders, "beside": (("look", 0),)}
    changed = replace(part, actors=(*part.actors, look), orders=orders)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


def _seen(plan: PhysicalPlan, *, late: bool) -> float:
    """Return what the looking actor sees, before the other threads are through or behind them."""
    gate.clear()
    step = training_step(DATA)
    with start(DATA, plan) as session, ThreadPoolExecutor(1) as caller:
        began = caller.submit(session.step, step.batches[0], step.scalars)
        if late:
            before = session.workers[0, "beside"]
            others = [worker for worker in session.workers.values() if worker is not before]
            assert wait_until(
                lambda: all(len(worker.order) == worker.place + 1 for worker in others)
            )
            assert wait_until(lambda: all(not worker.current_actor for worker in others))
        gate.set()
        return began.result().outputs["seen"].item()


def test_a_plan_whose_results_depend_on_timing_is_refused() -> None:
    # The check accepted it once: the actor saw the old parameter or the new one, as it came.
    raced, whole = _looking_beside(_in_place()), _looking_beside(_beside())

    assert _seen(raced, late=True) != _seen(whole, late=True) == _seen(whole, late=False)
    with pytest.raises(PlanError, match="overwritten in place before all reads") as caught:
        check(raced, types=False)
    assert "'look' of rank 0" in caught.value.where[1]
    check(whole, types=False)
