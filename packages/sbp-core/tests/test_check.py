from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sbp_core import check as check_module
from sbp_core.boxing import StepKind
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Collective, Receive
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Rate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.testing.plans import data_parallel_plan, diamond, pipeline_plan, strategy_of

_MIXED = Placement.grid((2, 2), ("pipe", "data"))


def _changed(plan: PhysicalPlan, rank: int, change: Callable[[RankPlan], RankPlan]) -> PhysicalPlan:
    ranks = tuple(change(part) if part.rank == rank else part for part in plan.ranks)
    return replace(plan, ranks=ranks)


def _moved_first(plan: PhysicalPlan, rank: int, firing: tuple[str, int]) -> PhysicalPlan:
    """Return the plan with one firing put at the head of its thread."""

    def change(part: RankPlan) -> RankPlan:
        order = [entry for entry in part.orders["compute"] if entry != firing]
        return replace(part, orders={**part.orders, "compute": (firing, *order)})

    return _changed(plan, rank, change)


def _with_quota(plan: PhysicalPlan, rank: int, register: str, quota: int) -> PhysicalPlan:
    def change(part: RankPlan) -> RankPlan:
        registers = [replace(r, quota=quota) if r.name == register else r for r in part.registers]
        return replace(part, registers=tuple(registers))

    return _changed(plan, rank, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        data_parallel_plan(),
        pipeline_plan(4, (2, 1)),
        pipeline_plan(4, (4, 4)),
        pipeline_plan(4, (2, 1), mesh=_MIXED),
        pipeline_plan(4, (2, 1), mesh=_MIXED, options=CompileOptions(boxing_thread=True)),
    ],
    ids=["data", "1F1B", "GPipe", "mixed", "mixed with a boxing thread"],
)
def test_compiled_plans_pass_and_no_register_overflows(plan: PhysicalPlan) -> None:
    report = check(plan)

    firings = [actor.num_firings(plan.repetitions) for part in plan.ranks for actor in part.actors]
    assert report.num_firings == sum(firings)
    quotas = {(part.rank, r.name): r.quota for part in plan.ranks for r in part.registers}
    assert report.occupancy.keys() == quotas.keys()
    assert all(1 <= live <= quotas[place] for place, live in report.occupancy.items())


def test_the_module_can_be_called() -> None:
    assert check_module(data_parallel_plan()).num_firings > 0


def test_gpipe_holds_more_than_one_forward_one_backward() -> None:
    gpipe, alternating = (check(pipeline_plan(4, quotas)) for quotas in ((4, 4), (2, 1)))

    stash = (0, "forward.0.0#0")
    assert (gpipe.occupancy[stash], alternating.occupancy[stash]) == (4, 2)


def test_a_quota_that_is_too_low_is_refused_with_the_cycle() -> None:
    plan = _with_quota(pipeline_plan(3, (3, 3)), 0, "forward.0.0#0", 1)

    with pytest.raises(PlanError, match="the plan would deadlock") as caught:
        check(plan)

    assert caught.value.where == (
        "rank 0, thread compute: stage 0's forward.0.0 of micro-batch 1 waits for credit of "
        "register forward.0.0#0 (1)",
    )
    assert "raise the quota of register forward.0.0#0 of rank 0 from 1 to 3" in caught.value.todo


def test_a_cycle_over_two_ranks_is_printed_in_order() -> None:
    plan = _moved_first(pipeline_plan(2, (2, 1)), 0, ("receive layers.1.grad.mm_1@0(B)", 0))

    with pytest.raises(PlanError, match="each of these waits for the next") as caught:
        check(plan)

    assert caught.value.where == (
        "rank 0, thread compute: stage 0's receive layers.1.grad.mm_1@0(B) of micro-batch 0 waits "
        "for data on link send layers.1.grad.mm_1@0(B) 1>0",
        "rank 1, thread compute: stage 1's receive layers.0.relu@1(B) of micro-batch 0 waits for "
        "data on link send layers.0.relu@1(B) 0>1",
    )


def test_collectives_in_different_orders_are_refused() -> None:
    graph = diamond()
    split = {"y": "S(1) | S(0) -> P", "loss": "S(0) -> P"}
    plan = compile_plan(graph, strategy_of(graph, signatures=split, storage={"w": "S(0)"}))
    gather = ("w@0(B)!backward", 0)
    assert plan.by_rank[0].orders["compute"][0] != gather
    plan = _moved_first(plan, 0, gather)
    first = [entry for entry in plan.by_rank[1].orders["compute"] if entry != gather]
    plan = _changed(plan, 1, lambda p: replace(p, orders={"compute": (*first, gather)}))

    with pytest.raises(PlanError, match="would deadlock") as caught:
        check(plan)

    assert any("waits for rank 1 to arrive" in line for line in caught.value.where)


def _without(plan: PhysicalPlan, kind: str, name: str) -> PhysicalPlan:
    """Return the plan with one actor, register, or slot of rank 0 missing."""

    def change(part: RankPlan) -> RankPlan:
        kept = tuple(entry for entry in getattr(part, kind) if entry.name != name)
        assert len(kept) < len(getattr(part, kind))
        return replace(part, **{kind: kept})

    return _changed(plan, 0, change)


def _pipeline() -> PhysicalPlan:
    return pipeline_plan(2, (2, 1))


def _mixed() -> PhysicalPlan:
    return pipeline_plan(2, (2, 1), mesh=_MIXED)


def _without_a_firing() -> PhysicalPlan:
    return _changed(
        _pipeline(), 0, lambda p: replace(p, orders={"compute": p.orders["compute"][:-1]})
    )


def _with_a_firing_twice() -> PhysicalPlan:
    return _changed(
        _pipeline(), 0, lambda p: replace(p, orders={"compute": p.orders["compute"][:1] * 2})
    )


def _with_an_unknown_actor() -> PhysicalPlan:
    return _changed(_pipeline(), 0, lambda p: replace(p, orders={"compute": (("nobody", 0),)}))


def _on_the_wrong_thread() -> PhysicalPlan:
    return _changed(_pipeline(), 0, lambda p: replace(p, orders={"other": p.orders["compute"]}))


def _without_a_link() -> PhysicalPlan:
    plan = _pipeline()
    return replace(plan, links=plan.links[1:])


def _without_a_step() -> PhysicalPlan:
    return replace(_pipeline(), steps=())


def _without_a_partner() -> PhysicalPlan:
    plan = _mixed()
    return replace(plan, ranks=plan.ranks[1:])


def _changed_actor(plan: PhysicalPlan, rank: int, name: str, **fields: object) -> PhysicalPlan:
    def change(part: RankPlan) -> RankPlan:
        actors = [replace(a, **fields) if a.name == name else a for a in part.actors]
        return replace(part, actors=tuple(actors))

    return _changed(plan, rank, change)


def _collectives(plan: PhysicalPlan) -> list[str]:
    return [a.name for a in plan.by_rank[1].actors if isinstance(a, Collective)]


def _with_a_partner_of_another_step() -> PhysicalPlan:
    plan = _mixed()
    name, other = _collectives(plan)[0], len(plan.steps)
    step = replace(plan.steps[plan.by_rank[1].by_name[name].step], dtype="int32")
    return _changed_actor(replace(plan, steps=(*plan.steps, step)), 1, name, step=other)


def _with_a_transfer_as_collective() -> PhysicalPlan:
    plan = _mixed()
    transfer = next(i for i, step in enumerate(plan.steps) if step.kind is StepKind.TRANSFER)
    for rank in (0, 1):
        plan = _changed_actor(plan, rank, _collectives(plan)[0], step=transfer)
    return plan


def _with_a_receiver_at_another_rate() -> PhysicalPlan:
    plan = _pipeline()
    (name,) = (a.name for a in plan.by_rank[1].actors if isinstance(a, Receive))
    return _changed_actor(plan, 1, name, rate=Rate.STEP)


def _with_a_register_filled_at_another_rate() -> PhysicalPlan:
    def change(part: RankPlan) -> RankPlan:
        first, *rest = part.registers
        return replace(part, registers=(replace(first, rate=Rate.STEP), *rest))

    return _changed(_pipeline(), 0, change)


def _with_a_register_read_at_another_rate() -> PhysicalPlan:
    def change(part: RankPlan) -> RankPlan:
        registers = [
            replace(r, consumers=("optimizer.0.2",)) if "layers.0.grad.mm" in r.keys else r
            for r in part.registers
        ]
        return replace(part, registers=tuple(registers))

    return _changed(_pipeline(), 0, change)


def _with_keys_that_nobody_makes() -> PhysicalPlan:
    def change(part: RankPlan) -> RankPlan:
        first, *rest = part.registers
        return replace(part, registers=(replace(first, keys=(*first.keys, "ghost")), *rest))

    return _changed(_pipeline(), 0, change)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_without_a_firing, r"'optimizer.0.2' fires 0 times a step"),
        (
            _with_a_firing_twice,
            r"firing 0 of 'forward.0.0' is not due there\n.*'compute' of rank 0",
        ),
        (_with_an_unknown_actor, r"firing 0 of 'nobody' is not due"),
        (_on_the_wrong_thread, r"firing 0 of .* is not due there\n.*'other' of rank 0"),
        (_without_a_link, r"nothing of this boxing step is planned on the ranks \[1\]"),
        (_without_a_step, r"there is no boxing step 0"),
        (_with_a_partner_of_another_step, r"nothing of this boxing step is planned on the ranks"),
        (_with_a_transfer_as_collective, r"nothing of this boxing step is planned on the ranks"),
        (_with_a_receiver_at_another_rate, r"'receive .*' step 0 at rate 'step'"),
        (_with_a_register_filled_at_another_rate, "fills at rate 'micro', the register at rate"),
        (_without_a_partner, r"rank 0 has no send 'send layers.0.relu@1\(B\)'"),
        (
            lambda: _without(_pipeline(), "registers", "forward.0.0#0"),
            "'layers.0.relu' comes from 0 places",
        ),
        (lambda: _without(_pipeline(), "slots", "x"), "'x' comes from 0 places"),
        (lambda: _without(_pipeline(), "actors", "forward.0.0"), r"there is no \['forward.0.0'\]"),
        (lambda: _with_quota(_pipeline(), 0, "forward.0.0#0", 0), "a register of quota 0"),
        (_with_a_register_read_at_another_rate, "comes from 0 places"),
        (_with_keys_that_nobody_makes, r"'forward.0.0' does not make \['ghost'\]"),
    ],
)
def test_a_plan_that_is_broken_is_refused(broken: Callable[[], PhysicalPlan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(broken())


def test_a_register_must_be_read_as_often_as_it_is_filled() -> None:
    def change(part: RankPlan) -> RankPlan:
        registers = [
            replace(r, consumers=(*r.consumers, "optimizer.0.2"))
            if "layers.0.grad.mm" in r.keys
            else r
            for r in part.registers
        ]
        return replace(part, registers=tuple(registers))

    with pytest.raises(PlanError, match=r"filled 2 times a step, read 1 by 'optimizer\.0\.2'"):
        check(_changed(_pipeline(), 0, change))
