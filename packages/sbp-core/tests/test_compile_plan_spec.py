from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sbp_core.compile.actors import Accumulate, Actor, Compute, Instruction, Receive, Send
from sbp_core.compile.physical import PhysicalPlan, StateSlot
from sbp_core.compile.plan_spec import verify_plan
from sbp_core.errors import PlanError
from sbp_core.graph.ir import InputKind, Ref
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_core.testing.plans import data_parallel_plan, pipeline_plan


def _plan() -> PhysicalPlan:
    return pipeline_plan(2, (2, 1))


def _with_rank(**changes: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> PhysicalPlan:
    """Return the plan with parts of rank 0 changed."""
    plan = _plan()
    first, *others = plan.ranks
    changed = {name: change(getattr(first, name)) for name, change in changes.items()}
    return replace(plan, ranks=(replace(first, **changed), *others))


def _first(**changes: object) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    return lambda parts: (replace(parts[0], **changes), *parts[1:])


def _twice(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*parts, parts[0])


def _with_actor(kind: type[Actor], **changes: object) -> PhysicalPlan:
    """Return the plan with the first actor of a kind on rank 0 changed."""

    def change(actors: tuple[Actor, ...]) -> tuple[Actor, ...]:
        index = next(i for i, actor in enumerate(actors) if isinstance(actor, kind))
        return (*actors[:index], replace(actors[index], **changes), *actors[index + 1 :])

    return _with_rank(actors=change)


def _with_instruction(instruction: Instruction) -> PhysicalPlan:
    actor = next(a for a in _plan().ranks[0].actors if isinstance(a, Compute))
    return _with_actor(Compute, instructions=(*actor.instructions, instruction))


def _box(*args: object) -> PhysicalPlan:
    return _with_instruction(Instruction(op=LOCAL_BOX, args=args, outputs=("new",)))


def _called(op: str, kwargs: dict[str, int]) -> PhysicalPlan:
    return _with_instruction(Instruction(op=op, args=(), kwargs=kwargs, outputs=("new",)))


def _with_step(**changes: object) -> PhysicalPlan:
    plan = _plan()
    return replace(plan, steps=(replace(plan.steps[0], **changes), *plan.steps[1:]))


def _with_link(**changes: object) -> PhysicalPlan:
    plan = _plan()
    return replace(plan, links=(replace(plan.links[0], **changes), *plan.links[1:]))


def _ranks_twice() -> PhysicalPlan:
    plan = _plan()
    return replace(plan, ranks=_twice(plan.ranks))


def _links_twice() -> PhysicalPlan:
    plan = _plan()
    return replace(plan, links=(*plan.links, replace(plan.links[0], name="another")))


def _link_to_another_step() -> PhysicalPlan:
    return _with_actor(Send, step=1)


def _link_to_another_name() -> PhysicalPlan:
    plan = _with_actor(Send, name="send x")
    return replace(plan, links=(replace(plan.links[0], sender=(0, "send x")), *plan.links[1:]))


def _emitted_twice() -> PhysicalPlan:
    first = _plan().ranks[0].actors[0]
    assert isinstance(first, Compute)
    return _with_rank(actors=_first(emits=(("loss", first.outputs[0]),)))


def _written_twice() -> PhysicalPlan:
    first = _plan().ranks[0].actors[0]
    assert isinstance(first, Compute)
    return _with_rank(actors=_first(writes=(("layers.0.weight", first.outputs[0]),)))


def _number_in_place() -> PhysicalPlan:
    first = _plan().ranks[0].actors[0]
    assert isinstance(first, Compute)
    number = StateSlot(
        name="step",
        kind=InputKind.OPTIMIZER_STATE,
        shape=(),
        dtype="float32",
        stage=0,
        sbp=None,
        local_shape=(),
    )
    return _with_rank(
        slots=lambda slots: (*slots, number),
        actors=_first(writes=(("step", first.outputs[0]),), in_place=("step",)),
    )


PAIR = Placement([0, 1], ("data",))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: replace(_plan(), num_micro_batches=0), "^0 micro-batches"),
        (_ranks_twice, "two ranks are called 0"),
        (lambda: _with_rank(actors=_twice), "two actors are called 'forward.0.0'"),
        (lambda: _with_rank(registers=_twice), "two registers are called"),
        (lambda: _with_rank(slots=_twice), "two slots are called 'layers.0.weight'"),
        (lambda: _with_rank(slots=_first(dtype="float33")), r"a tensor float33\["),
        (lambda: _with_rank(slots=_first(shape=(-8, 4))), r"a tensor float32\[-8, 4\]"),
        (lambda: _with_rank(slots=_first(stage=7)), "there is no stage 7"),
        (lambda: _with_rank(slots=_first(stage=1)), "stage 1 is not on this rank"),
        (lambda: _with_rank(slots=_first(sbp=NdSbp(S(5)))), r"S\(5\) splits a dim"),
        (lambda: _with_rank(slots=_first(sbp=NdSbp(B, B))), "2 entries for a mesh of 1 axes"),
        (lambda: _with_rank(slots=_first(local_shape=(1, 1))), r"a part of shape \(1, 1\)"),
        (lambda: _with_rank(actors=_first(stage=-1)), "there is no stage -1"),
        (lambda: _with_rank(actors=_first(reads=())), "uses '.*', which is not there"),
        (lambda: _with_rank(actors=_first(outputs=("ghost",))), "it hands on 'ghost'"),
        (lambda: _with_rank(actors=_first(emits=(("loss", "ghost"),))), "it hands on 'ghost'"),
        (lambda: _with_rank(actors=_first(writes=(("w", "ghost"),))), "it hands on 'ghost'"),
        (lambda: _with_actor(Send, inputs=("a", "b")), r"boxes \['a', 'b'\]"),
        (lambda: _with_actor(Send, inputs=(), reads=()), r"boxes \[\]"),
        (lambda: _with_actor(Receive, outputs=("ghost",)), "it hands on 'ghost'"),
        (lambda: _with_actor(Accumulate, inputs=(), reads=()), "it sums '.*', which is not there"),
        (lambda: _with_actor(Accumulate, emits=(("loss", "ghost"),)), "it hands on 'ghost'"),
        (lambda: _box(Ref("x"), 99), "local_box of .*99"),
        (lambda: _box(Ref("x"), True), "local_box of .*True"),
        (lambda: _box(0, 0), r"local_box of \(0, 0\)"),
        (lambda: _box(Ref("x")), "local_box of "),
        (lambda: _box(Ref("x"), 0), "local_box of .*0"),
        (lambda: _called("host.neg", {"x; y": 0}), "host.neg takes no argument 'x; y'"),
        (lambda: _called(LOCAL_BOX, {"dim": 0}), "local_box takes no argument 'dim'"),
        (lambda: _with_step(shape=(-1, 4)), r"a tensor float32\[-1, 4\]"),
        (lambda: _with_step(dtype="number"), "no dtype is called 'number'"),
        (lambda: _with_step(axes=(4,)), r"on axes \[4\]\n  in boxing step 0"),
        (lambda: _with_step(size_bytes=-1), "-1 bytes"),
        (lambda: _with_step(source=(PAIR, NdSbp(S(3)))), r"S\(3\) splits a dim"),
        (lambda: _with_step(target=(PAIR, NdSbp())), "0 entries for a mesh of 1 axes"),
        (_links_twice, "two links are called '0 send .* to 1 receive .*"),
        (_link_to_another_step, r"'send layers.0.relu@1\(B\)' does step 1 at"),
        (_link_to_another_name, "'send x' does step 0 at rate 'micro', 'receive"),
        (_emitted_twice, "two emits of actors are called 'loss'"),
        (_written_twice, "two writes of actors are called 'layers"),
        (_number_in_place, r"\['step'\] in place"),
        (lambda: _with_link(sender=(0, "nobody")), "rank 0 has no send 'nobody'"),
        (lambda: _with_link(sender=(9, "forward.0.0")), "rank 9 has no send"),
        (lambda: _with_link(receiver=(0, "forward.0.0")), "rank 0 has no receive 'forward.0.0'"),
    ],
)
def test_each_rule_that_is_broken_is_named(
    broken: Callable[[], PhysicalPlan], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        verify_plan(broken())


def test_compiled_plans_are_legal() -> None:
    for plan in (data_parallel_plan(), pipeline_plan(4, (2, 1))):
        assert verify_plan(plan) is plan
