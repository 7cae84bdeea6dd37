"""No state is overwritten before all are through with its old value, whatever the timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_by_hand import (
    GATHER,
    REDUCE,
    SEND,
    boxing,
    call,
    firings_of,
    part,
    plan_of,
    register,
    segment,
)

from sbp_core.compile import CompileOptions
from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    Collective,
    Compute,
    Instruction,
    Receive,
    Send,
)
from sbp_core.compile.hazards import SegmentHazards, verify_overwriting
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.symmetry import FoldedPlan, fold
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Phase, Rate, Ref
from sbp_core.plan_check import check
from sbp_core.testing.plans import data_parallel_plan

_UPDATE = segment(
    "update", call("add_.Tensor", "w w2", "new"), reads=("w", "w2"), writes=(("w", "new"),),
    in_place=("w",),
)  # fmt: skip


def _look(name: str = "look", key: str = "w", **parts: object) -> Compute:
    takes = {"inputs": (key,)} if key != "w" else {"reads": ("w",)}
    return segment(name, call("neg.default", key, f"{name} n"), **takes, **parts)


def _verify(*parts: RankPlan) -> None:
    plan = plan_of(*parts)
    alone = fold(plan, {part.rank: part.rank for part in plan.ranks})
    verify_overwriting(plan, alone, firings_of(plan))


def _refused(*parts: RankPlan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        _verify(*parts)
    return caught.value


def test_who_looks_before_on_the_same_thread_is_through() -> None:
    _verify(part(0, _look(), _UPDATE))


def test_who_looks_later_is_refused_with_both_actors() -> None:
    error = _refused(part(3, _UPDATE, _look()))

    assert "'w' is overwritten in place before all reads of its old value are done" in str(error)
    assert error.where == (
        "actor 'update' of rank 3, which overwrites it",
        "actor 'look' of rank 3, which may look at it then",
    )
    assert "take 'w' out of in_place of 'update'" in error.todo


def test_another_thread_has_to_be_waited_for() -> None:
    beside = _look(thread="beside")

    _verify(part(0, beside, _UPDATE, registers=[register("look", "update")]))
    assert "rank 0" in _refused(part(0, beside, _UPDATE)).where[1]


def test_a_view_that_came_by_a_register_is_the_memory_of_the_state() -> None:
    view = segment("view", call("t.default", "w", "t"), reads=("w",), outputs=("t",))
    copy = segment("view", call("clone.default", "w", "t"), reads=("w",), outputs=("t",))
    taken = [register("view", "look", "t")]

    _verify(part(0, view, _look(key="t"), _UPDATE, registers=taken))
    _verify(part(0, copy, _UPDATE, _look(key="t"), registers=taken))
    assert "'look'" in _refused(part(0, view, _UPDATE, _look(key="t"), registers=taken)).where[1]


def test_a_part_that_an_accumulation_hands_on_as_it_is_is_the_memory_of_the_state() -> None:
    def handing_on(how: float | None) -> tuple[RankPlan, ...]:
        view = segment("view", call("t.default", "w", "t"), reads=("w",), outputs=("t",))
        keep = Accumulate(
            name="keep", stage=0, phase=Phase.OPTIMIZER, rate=Rate.MICRO, thread="compute",
            inputs=("t",), outputs=("last",), accumulates=(("t", "last", how),),
        )  # fmt: skip
        taken = [register("view", "keep", "t"), register("keep", "look", "last")]
        return (part(0, view, keep, _UPDATE, _look(key="last"), registers=taken),)

    _verify(*handing_on(1.0))
    assert "'look'" in _refused(*handing_on(None)).where[1]


def test_the_new_value_is_looked_at_later() -> None:
    handing = replace(_UPDATE, outputs=("new",))

    _verify(part(0, handing, _look(key="new"), registers=[register("update", "look", "new")]))


def _gathering(*behind: Actor, first: Actor = _UPDATE) -> tuple[RankPlan, ...]:
    """Return a plan in which both ranks gather `w`; rank 0 overwrites it, rank 1 goes on."""
    gather = boxing(Collective, "gather", GATHER, reads=("w",), outputs=("gather",))
    user = _look("use", "gather")
    taken = [register("gather", "use", "gather")]
    commit = boxing(Collective, "commit", REDUCE)
    return (
        part(0, gather, user, *([commit] if behind else []), first, registers=taken),
        part(1, gather, user, *([commit] if behind else []), *behind, registers=taken),
    )


def test_other_ranks_that_box_a_state_are_waited_for_by_an_all_reduce() -> None:
    _verify(*_gathering(segment("nothing")))

    error = _refused(*_gathering())
    assert error.where[0] == "actor 'update' of rank 0, which overwrites it"
    assert "of rank 1, which may look at it then" in error.where[1]


def test_a_copy_that_boxing_makes_is_the_memory_of_other_ranks() -> None:
    zero, one = _gathering(segment("nothing"))
    late = segment("late", call("neg.default", "gather", "n"), inputs=("gather",))
    orders = {"compute": (*one.orders["compute"], ("late", 0))}
    one = replace(
        one, actors=(*one.actors, late), orders=orders,
        registers=(*one.registers, register("gather", "late", "gather")),
    )  # fmt: skip

    assert _refused(zero, one).where[1] == "actor 'late' of rank 1, which may look at it then"


def test_what_was_sent_is_the_memory_of_the_sender() -> None:
    send = boxing(Send, "send x", SEND, reads=("w",))
    receive = boxing(Receive, "receive x", SEND, outputs=("x",))
    taken = [register("receive x", "use", "x")]
    use, commit = _look("use", "x"), boxing(Collective, "commit", REDUCE)

    _verify(part(0, send, commit, _UPDATE), part(1, receive, use, commit, registers=taken))
    error = _refused(part(0, send, commit, _UPDATE), part(1, receive, commit, use, registers=taken))
    assert "'use' of rank 1" in error.where[1]


def test_what_was_begun_and_nobody_has_waited_for_may_still_look() -> None:
    def beginning(**begun: object) -> tuple[RankPlan, ...]:
        gather = boxing(Collective, "gather", GATHER, reads=("w",), outputs=("gather",), **begun)
        taken = [register("gather", "use", "gather")]
        commit, use = boxing(Collective, "commit", REDUCE), _look("use", "gather")
        used = segment("use")
        return (
            part(0, gather, commit, _UPDATE, replace(use, instructions=()), registers=taken),
            part(1, gather, commit, used, registers=[register("gather", "use", "gather")]),
        )

    _verify(*beginning())
    assert "'gather'" in _refused(*beginning(begin_s=0.0)).where[1]


def test_a_state_that_boxing_makes_is_copied_over_when_all_have_had_its_old_value() -> None:
    gather = boxing(
        Collective, "gather", GATHER, reads=("w",), writes=(("w", "gather"),), in_place=("w",)
    )
    other = replace(gather, reads=("v",))

    _verify(*(part(rank, _look(), other) for rank in (0, 1)))
    assert "'gather'" in _refused(*(part(rank, gather) for rank in (0, 1))).where[1]


@pytest.mark.parametrize("made", ["t", "w"])
def test_no_result_and_no_other_state_lies_in_memory_that_is_overwritten(made: str) -> None:
    view = segment("view", call("t.default", "w", "t"), reads=("w",))

    for leaving in ({"emits": (("loss", made),)}, {"writes": (("v", made),)}):
        error = _refused(part(0, replace(view, **leaving), _UPDATE))
        assert "may be in the memory of 'w', which is overwritten in place" in str(error)
        assert "actor 'view' of rank 0, which hands it out" in error.where


def test_a_result_is_no_new_value_either_as_the_next_step_overwrites_it() -> None:
    error = _refused(part(0, replace(_UPDATE, emits=(("loss", "new"),))))

    assert "the result 'loss' may be in the memory of 'w'" in str(error)


# Inside of a segment.


def _hazards(entries: list[tuple[str, str, str]], writes: dict[str, str]) -> SegmentHazards:
    calls = [call(*entry) for entry in entries]
    actor = segment("update", *calls, writes=tuple(writes.items()), in_place=tuple(writes))
    return SegmentHazards(actor, ("w", "t"), 0)


def test_instructions_count() -> None:
    found = _hazards(
        [
            ("neg.default", "t", "n"),
            ("view.default", "w", "s"),
            ("sqrt.default", "s", "q"),
            ("mul_.Tensor", "w q", "a"),
            ("add_.Tensor", "a n", "b"),
            ("neg.default", "b", "c"),
        ],
        {"w": "b"},
    )

    assert found.last == {"t": 0, "w": 3}
    assert found.overwrites == {"w": 3}


def test_a_new_value_from_elsewhere_is_copied_behind_the_firing() -> None:
    found = _hazards([("neg.default", "t", "n")], {"w": "x", "v": "n"})

    assert found.overwrites == {"w": 1, "v": 2}


@pytest.mark.parametrize(
    ("entries", "new", "what"),
    [
        # Something looks at the old value later: itself, or a view of it.
        ([("mul_.Tensor", "w g", "a"), ("neg.default", "w", "n")], "a", "neg.default looks at 'w'"),
        (
            [("t.default", "w", "s"), ("mul_.Tensor", "w g", "a"), ("neg.default", "s", "n")],
            "a",
            "neg.default looks at 's'",
        ),
        # At what lies there, by another name.
        ([("add_.Tensor", "w w", "a")], "a", "overwrites 'w' with it"),
        ([("t.default", "w", "s"), ("add_.Tensor", "w s", "a")], "a", "overwrites 'w' with it"),
        ([("t.default", "w", "s")], "s", "overwrites 'w' with it"),
        # At a value on the way.
        (
            [("mul_.Tensor", "w g", "a"), ("add_.Tensor", "a g", "b"), ("neg.default", "a", "n")],
            "b",
            "neg.default looks at 'a'",
        ),
        ([("mul_.Tensor", "w g", "a"), ("add_.Tensor", "a g", "b")], "a", "the copy"),
    ],
)
def test_an_instruction_that_looks_too_late_is_refused(
    entries: list[tuple[str, str, str]], new: str, what: str
) -> None:
    with pytest.raises(PlanError, match=what) as caught:
        _hazards(entries, {"w": new})

    assert caught.value.where == ("actor 'update' of rank 0",)


def test_a_view_from_elsewhere_is_looked_at_before_the_state_is_overwritten() -> None:
    view = segment("view", call("t.default", "w", "t"), reads=("w",), outputs=("t",))
    before = segment(
        "update", call("neg.default", "t", "n"), call("add_.Tensor", "w n", "new"), inputs=("t",),
        reads=("w",), writes=(("w", "new"),), in_place=("w",),
    )  # fmt: skip
    taken = [register("view", "update", "t")]

    _verify(part(0, view, before, registers=taken))
    late = replace(before, instructions=(call("add_.Tensor", "w t", "new"),))
    assert "itself looks at it" in _refused(part(0, view, late, registers=taken)).where[1]


# Ranks that do the same: what is not boxed is looked at on one of them.


def _is_refused(plan: PhysicalPlan, folded: FoldedPlan) -> bool:
    try:
        verify_overwriting(plan, folded, firings_of(folded.plan, folded.stands_for))
    except PlanError:
        return True
    return False


def _parts_of_a_class() -> Mapping[str, Actor]:
    """Return actors of two ranks that do the same: some look at a state, one of them by boxing."""
    gather = boxing(Collective, "gather", GATHER, reads=("w",), outputs=("gather",))
    view = segment("view", call("t.default", "w", "view"), reads=("w",), outputs=("view",))
    commit = boxing(Collective, "commit", REDUCE)
    return {
        "gather": gather, "use": _look("use", "gather"), "view": view, "far": _look("far", "view"),
        "look": _look(), "commit": commit, "update": _UPDATE,
    }  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.permutations(["gather", "use", "view", "far", "look", "commit", "update"]),
    st.lists(st.booleans(), min_size=7, max_size=7),
    st.sets(st.sampled_from(["gather", "look", "view"])),
    st.booleans(),
)
def test_a_class_is_refused_what_each_of_its_ranks_is(
    order: list[str], beside: list[bool], left_out: set[str], waits: bool
) -> None:
    made = _parts_of_a_class()
    gone = left_out | {one for one, of in (("use", "gather"), ("far", "view")) if of in left_out}
    threads = dict(zip(made, ("beside" if one else "compute" for one in beside), strict=True))
    names = [name for name in order if name not in gone]
    for maker, taker in (("gather", "use"), ("view", "far")):
        if maker in names and names.index(maker) > names.index(taker):
            names.remove(taker)
            names.append(taker)
    actors = [replace(made[name], thread=threads[name]) for name in names]
    taken = [register(m, t, m) for m, t in (("gather", "use"), ("view", "far")) if m in names]
    if waits and names.index("commit") < names.index("update"):
        taken.append(register("commit", "update"))

    plan = plan_of(*(part(rank, *actors, registers=taken) for rank in (0, 1)))

    folded = fold(plan)
    assert len(folded.plan.ranks) == 1
    assert _is_refused(plan, folded) == _is_refused(plan, fold(plan, {0: 0, 1: 1}))


# Plans of the compiler, edited.


def _edited(plan: PhysicalPlan, rank: int, actor: Actor, place: int) -> PhysicalPlan:
    """Return a plan with an actor more, at a place of the order of its thread."""
    one = plan.by_rank[rank]
    order = list(one.orders.get(actor.thread, ()))
    order.insert(place, (actor.name, 0))
    orders = {**one.orders, actor.thread: tuple(order)}
    changed = replace(one, actors=(*one.actors, actor), orders=orders)
    return replace(plan, ranks=tuple(changed if p is one else p for p in plan.ranks))


def _norm(thread: str = "compute") -> Compute:
    state = "layers.0.weight"
    return segment(
        "norm", call("neg.default", state, "seen"), reads=(state,), emits=(("seen", "seen"),),
        thread=thread,
    )  # fmt: skip


@pytest.mark.parametrize(("thread", "place"), [("compute", -1), ("compute", 0)])
def test_an_actor_before_the_update_may_look_at_a_state(thread: str, place: int) -> None:
    check(_edited(data_parallel_plan(), 0, _norm(thread), place), types=False)


@pytest.mark.parametrize(("thread", "place"), [("compute", 6), ("beside", 0)])
def test_an_actor_that_the_update_does_not_wait_for_may_not(thread: str, place: int) -> None:
    # Both were accepted once; the second gave one result or the other, as the threads came.
    edited = _edited(data_parallel_plan(), 1, _norm(thread), place)

    with pytest.raises(PlanError, match=r"'layers.0.weight' is overwritten in place") as caught:
        check(edited, types=False)
    assert "'norm' of rank 1" in caught.value.where[1]
    beside = data_parallel_plan(CompileOptions(in_place_states=False))
    check(_edited(beside, 1, _norm(thread), place), types=False)


def _with_actors(plan: PhysicalPlan, name: str, **changes: object) -> PhysicalPlan:
    return replace(
        plan,
        ranks=tuple(
            replace(
                one,
                actors=tuple(replace(a, **changes) if a.name == name else a for a in one.actors),
            )
            for one in plan.ranks
        ),
    )


def test_a_state_is_not_overwritten_for_each_micro_batch() -> None:
    plan = data_parallel_plan()

    with pytest.raises(PlanError, match="in place for each micro-batch"):
        check(_with_actors(plan, "optimizer.0.1", rate=Rate.MICRO), types=False)


def test_what_comes_by_a_register_is_not_written_over_under_the_name_of_a_state() -> None:
    plan = data_parallel_plan()
    update = plan.by_rank[0].by_name["optimizer.0.1"]
    state = "layers.0.weight"
    gradient = "layers.0.grad.mm"
    registers = tuple(
        replace(r, keys=tuple(state if key == gradient else key for key in r.keys))
        for r in plan.by_rank[0].registers
    )
    backward = plan.by_rank[0].by_name["backward.0.1"]
    renamed = tuple(
        replace(c, outputs=tuple(state if key == gradient else key for key in c.outputs))
        for c in backward.instructions
    )
    made = tuple(state if key == gradient else key for key in backward.outputs)
    taken = tuple(state if key == gradient else key for key in update.inputs)
    plan = replace(plan, ranks=tuple(replace(one, registers=registers) for one in plan.ranks))
    plan = _with_actors(plan, "backward.0.1", instructions=renamed, outputs=made)
    calls = tuple(
        replace(c, args=tuple(Ref(state) if a == Ref(gradient) else a for a in c.args))
        for c in update.instructions
    )

    with pytest.raises(PlanError, match=f"writes over .*{state}"):
        check(_with_actors(plan, "optimizer.0.1", inputs=taken, instructions=calls), types=False)


def test_no_instruction_makes_what_is_there() -> None:
    plan = data_parallel_plan()
    forward = plan.by_rank[0].by_name["forward.0.1"]
    again = Instruction(op="aten.neg.default", args=(Ref("sum"),), outputs=("layers.0.weight",))

    with pytest.raises(PlanError, match=r"makes 'layers.0.weight', which is there already"):
        check(
            _with_actors(plan, "forward.0.1", instructions=(*forward.instructions, again)),
            types=False,
        )
