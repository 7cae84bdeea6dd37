"""What is known to be over when an actor begins, on whatever thread or rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_by_hand import (
    REDUCE,
    SEND,
    SEND_NOTHING,
    STEPS,
    boxing,
    firings_of,
    part,
    plan_of,
    register,
    segment,
)

from sbp_core.boxing import StepKind, route
from sbp_core.compile.actors import ActorId, Collective, Receive, Send
from sbp_core.compile.commit import commit_step
from sbp_core.compile.happens_before import HappensBefore
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.symmetry import fold
from sbp_core.graph.ir import Rate
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp


def _is_over(plan: PhysicalPlan, first: ActorId, second: ActorId) -> bool:
    """Whether an actor is through for certain when another one begins."""
    alone = fold(plan, {part.rank: part.rank for part in plan.ranks})
    before = HappensBefore(plan, alone, firings_of(plan), {second})
    over = before.over(first)
    return over is not None and before.clock(second).has_been(*over)


def test_what_a_thread_did_before_is_over_and_what_comes_later_is_not() -> None:
    plan = plan_of(part(0, segment("a"), segment("b"), segment("c")))

    assert _is_over(plan, (0, "a"), (0, "b"))
    assert not _is_over(plan, (0, "b"), (0, "b"))
    assert not _is_over(plan, (0, "c"), (0, "b"))


def test_another_thread_is_waited_for_by_registers_only() -> None:
    beside = segment("b", thread="beside")
    apart = plan_of(part(0, segment("a"), beside))
    joined = plan_of(part(0, segment("a"), beside, registers=[register("a", "b")]))

    assert not _is_over(apart, (0, "a"), (0, "b"))
    assert _is_over(joined, (0, "a"), (0, "b"))


def test_what_is_known_is_handed_on_from_thread_to_thread() -> None:
    plan = plan_of(
        part(
            0,
            segment("a"),
            segment("b", thread="beside"),
            segment("late", thread="beside"),
            segment("c", thread="third"),
            registers=[register("a", "b"), register("b", "c")],
        )
    )

    assert _is_over(plan, (0, "a"), (0, "c"))
    assert not _is_over(plan, (0, "late"), (0, "c"))


def _meeting(*behind: str, step: int = REDUCE) -> PhysicalPlan:
    meet = boxing(Collective, "meet", step)
    parts = [part(r, segment("a"), meet, *map(segment, behind)) for r in (0, 1)]
    return plan_of(*parts)


def test_nobody_leaves_an_all_reduce_before_all_have_come() -> None:
    plan = _meeting("b")

    assert _is_over(plan, (1, "a"), (0, "b"))
    assert _is_over(plan, (0, "a"), (1, "b"))
    # Another rank may be in the middle of it.
    assert not _is_over(plan, (1, "meet"), (0, "b"))
    assert not _is_over(plan, (1, "b"), (0, "b"))


def test_other_collectives_and_empty_ones_are_not_relied_on() -> None:
    empty = replace(STEPS[REDUCE], shape=(0,), size_bytes=0)
    plan = _meeting("b")

    for step in (empty, replace(empty, kind=StepKind.ALL_GATHER, shape=(4,))):
        loose = replace(plan, steps=(step, *STEPS[1:]))
        assert not _is_over(loose, (1, "a"), (0, "b"))


@pytest.mark.parametrize(("step", "waits"), [(SEND, True), (SEND_NOTHING, False)])
def test_who_receives_waits_for_those_that_have_something_for_it(step: int, waits: bool) -> None:
    plan = plan_of(
        part(0, segment("a"), boxing(Send, "send x", step, reads=("x",))),
        part(1, boxing(Receive, "receive x", step), segment("b")),
    )

    assert _is_over(plan, (0, "a"), (1, "b")) is waits
    assert not _is_over(plan, (1, "receive x"), (0, "send x"))


def _overlapping(*registers: str, thread: str = "compute") -> PhysicalPlan:
    """Return a plan that begins a collective, then fires `b` and `c`; some of them take it."""
    meet = boxing(Collective, "meet", REDUCE, begin_s=0.0, outputs=("meet",))
    return plan_of(
        *(
            part(
                rank,
                segment("a"),
                meet,
                segment("b"),
                segment("c", thread=thread),
                registers=[register("meet", name, "meet") for name in registers],
            )
            for rank in (0, 1)
        )
    )


def test_what_goes_on_beside_its_thread_is_over_when_somebody_takes_it() -> None:
    assert not _is_over(_overlapping(), (0, "meet"), (0, "c"))
    assert not _is_over(_overlapping("c"), (0, "meet"), (0, "b"))
    assert _is_over(_overlapping("c"), (0, "meet"), (0, "c"))
    assert _is_over(_overlapping("b"), (0, "meet"), (0, "c"))


def test_other_ranks_have_come_when_somebody_takes_what_was_begun() -> None:
    assert not _is_over(_overlapping("c"), (1, "a"), (0, "b"))
    assert _is_over(_overlapping("c"), (1, "a"), (0, "c"))
    assert _is_over(_overlapping("c", thread="beside"), (1, "a"), (0, "c"))


def test_all_micro_batches_are_over_when_the_last_one_is() -> None:
    each = segment("a", rate=Rate.MICRO)
    one = part(0, each, segment("b", thread="beside"), registers=[register("a", "b")])
    orders = {**one.orders, "compute": (("a", 0), ("a", 1))}
    plan = replace(plan_of(replace(one, orders=orders)), num_micro_batches=2)

    assert _is_over(plan, (0, "a"), (0, "b"))


def test_a_clock_is_kept_of_what_comes_before_the_first_all_reduce_of_all() -> None:
    parts = [part(r, segment("a"), segment("b"), boxing(Collective, "sum", REDUCE)) for r in (0, 1)]
    plan = plan_of(*parts)

    assert _is_over(plan, (0, "a"), (0, "b"))
    assert not _is_over(plan, (1, "a"), (0, "b"))


def test_what_a_message_said_before_an_all_reduce_of_some_ranks_is_known_behind_it() -> None:
    ends = ((Placement([rank]), NdSbp(B)) for rank in (2, 1))
    step = route((4,), "float32", *ends).steps[0]
    plan = plan_of(
        part(0, boxing(Collective, "sum", REDUCE), segment("c")),
        part(1, boxing(Receive, "receive x", len(STEPS)), boxing(Collective, "sum", REDUCE)),
        part(2, segment("a"), boxing(Send, "send x", len(STEPS))),
    )

    assert _is_over(replace(plan, steps=(*STEPS, step)), (2, "a"), (0, "c"))


def test_messages_of_a_class_are_known_though_nobody_hears_of_the_first_of_its_ranks() -> None:
    mesh = Placement.grid((2, 2), ("data", "tensor"))
    # Ranks 0 and 3 hold what they need; 1 and 2 exchange theirs.
    ends = ((mesh, NdSbp.parse(text)) for text in ("B, S(0)", "S(0), S(0)"))
    (transfer,) = route((4,), "float32", *ends).steps
    meeting = commit_step([mesh])
    assert meeting is not None
    actors = (
        segment("a"),
        boxing(Send, "send x", 0, reads=("x",)),
        boxing(Collective, "meet", 1),
        boxing(Receive, "receive x", 0),
        segment("b"),
    )
    plan = replace(plan_of(*(part(r, *actors) for r in range(4))), stages=(mesh,))
    plan = replace(plan, steps=(transfer, meeting))
    folded = fold(plan)
    assert folded.members == {0: (0, 1, 2, 3)}
    firings = firings_of(folded.plan, folded.stands_for)

    before = HappensBefore(plan, folded, firings, {(1, "b")})

    assert all(before.clock((1, "b")).has_been(*_over(before, (r, "a"))) for r in range(4))


def _over(before: HappensBefore, actor_id: ActorId) -> tuple[int, int]:
    over = before.over(actor_id)
    assert over is not None
    return over
