"""States that new values overwrite: what a failed step leaves, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from actor_plans import DATA, gate, operator, run_step, start, training_step

from sbp_core.compile.physical import Instruction, PhysicalPlan
from sbp_core.compile.take_over import take_over
from sbp_core.errors import RunError
from sbp_core.graph.ir import Ref
from sbp_core.testing.cases import compile_case


def _in_place() -> PhysicalPlan:
    return take_over(compile_case(DATA))


def _failing_late(plan: PhysicalPlan) -> PhysicalPlan:
    """Let rank 0 fail in a last actor, after its states were overwritten."""
    part = plan.by_rank[0]
    last = part.by_name[part.orders["compute"][-1][0]]
    state = next(slot.name for slot in part.slots if slot.sbp is not None)
    call = Instruction(op=operator("fail_after_gate"), args=(Ref(state),), outputs=("bad",))
    late = replace(
        last, name="late", inputs=(), reads=(state,), outputs=(), emits=(), writes=(),
        in_place=(), instructions=(call,),
    )  # fmt: skip
    order = (*part.orders["compute"], ("late", 0))
    orders = {**part.orders, "compute": order}
    changed = replace(part, actors=(*part.actors, late), orders=orders)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


def test_overwritten_states_keep_their_memory_and_their_values() -> None:
    with start(DATA, _in_place()) as session, start(DATA) as usual:
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


def test_without_overwriting_a_late_failure_leaves_the_states() -> None:
    gate.set()
    with start(DATA, _failing_late(compile_case(DATA))) as session:
        with pytest.raises(RunError, match="late and wrong") as caught:
            run_step(session, DATA)

        assert "state_dict() still gives them" in caught.value.todo
        assert session.state_dict().keys() == training_step(DATA).states.keys()
