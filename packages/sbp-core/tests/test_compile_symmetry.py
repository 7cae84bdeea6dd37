"""Ranks that do the same are one rank of a folded plan, and what is proved of it holds for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import pytest
from planned_by_hand import firings_of

import sbp_core.plan_check as check_module
from sbp_core.boxing import route
from sbp_core.compile import CompileOptions, order
from sbp_core.compile.actors import Collective, Compute, Instruction
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.symmetry import FoldedPlan, fold, shard_shapes
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Ref
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.sbp import NdSbp
from sbp_core.testing.plans import pipeline_plan

_GRID = Placement.grid((2, 4), ("pipe", "data"))


def _classes(plan: PhysicalPlan) -> set[tuple[int, ...]]:
    return set(fold(plan).members.values())


def _changed(plan: PhysicalPlan, rank: int, **changes: object) -> PhysicalPlan:
    ranks = (replace(p, **changes) if p.rank == rank else p for p in plan.ranks)  # type: ignore[arg-type]
    return replace(plan, ranks=tuple(ranks))


def _with_quota(part: RankPlan, quota: int) -> tuple[object, ...]:
    return replace(part.registers[0], quota=quota), *part.registers[1:]


def _rank_by_rank(
    plan: PhysicalPlan, marks: Mapping[int, Hashable] | None = None, *, numbers: bool = False
) -> FoldedPlan:
    """Fold nothing: every rank is a class of its own."""
    return fold(plan, {part.rank: part.rank for part in plan.ranks})


def test_the_ranks_of_a_stage_are_one_class() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)

    folded = fold(plan)

    assert folded.members == {0: (0, 1, 2, 3), 4: (4, 5, 6, 7)}
    assert [part.rank for part in folded.plan.ranks] == [0, 4]
    assert {(link.sender[0], link.receiver[0]) for link in folded.plan.links} == {(0, 4), (4, 0)}


def test_ranks_share_their_actors_and_registers() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)

    first, *others = plan.ranks[:4]

    for other in others:
        assert other.actors is first.actors
        assert other.registers is first.registers
        assert other.orders is first.orders


def test_ranks_whose_shards_differ_are_two_classes() -> None:
    mesh = Placement.grid((1, 3), ("pipe", "data"))

    plan = pipeline_plan(2, (1,), mesh=mesh, batch=4)

    assert _classes(plan) == {(0,), (1, 2)}


def test_a_rank_that_differs_parts_those_that_it_meets() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)

    changed = _changed(plan, 1, registers=_with_quota(plan.by_rank[1], 7))

    # Rank 5 receives of rank 1. The others of its stage meet it alike, in the group of all.
    assert _classes(changed) == {(0, 2, 3), (1,), (4, 6, 7), (5,)}


def test_numbers_that_operators_are_given_part_ranks_only_if_asked_for() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)
    first = plan.by_rank[1].actors[0]
    assert isinstance(first, Compute)
    own = Instruction(op="aten.sub.Scalar", args=(Ref("x"), 0), outputs=("y",))
    others = replace(first, instructions=(own,))
    shifted = replace(first, instructions=(replace(own, args=(Ref("x"), 8)),))
    real = replace(first, instructions=(replace(own, args=(Ref("x"), 8.0)),))

    def with_first(actor: Compute, odd: Compute) -> PhysicalPlan:
        changed = plan
        for rank in range(4):
            actors = (odd if rank == 1 else actor, *plan.by_rank[rank].actors[1:])
            changed = _changed(changed, rank, actors=actors)
        return changed

    assert _classes(with_first(others, shifted)) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert len(fold(with_first(others, shifted), numbers=True).members) > 2
    assert len(_classes(with_first(others, real))) > 2  # an operator may make another dtype


def test_groups_that_lack_a_rank_that_differs_are_apart() -> None:
    mesh = Placement.grid((2, 2), ("rows", "columns"))
    step, *_ = route(
        (4,), "float32", (mesh, NdSbp.parse("B, P")), (mesh, NdSbp.parse("B, B"))
    ).steps
    plan = pipeline_plan(1, (1,), mesh=Placement.grid((1, 4), ("pipe", "data")))
    like = next(actor for actor in plan.ranks[0].actors if isinstance(actor, Collective))
    actors = (replace(like, step=0),)
    plan = replace(
        plan,
        steps=(step,),
        ranks=tuple(
            RankPlan(
                rank=rank, slots=(), actors=actors, registers=(), orders={"here": (("a", rank),)}
                if rank == 3 else {},
            )
            for rank in range(4)
        ),
    )  # fmt: skip

    assert _classes(plan) == {(0, 1), (2,), (3,)}


def test_links_of_two_quotas_fold_to_the_least() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)
    both = (plan.links[0], replace(plan.links[0], name="more", quota=1))

    folded = fold(replace(plan, links=(*both, *plan.links[1:])))

    name = plan.links[0].sender[1]
    ends = [link for link in folded.plan.links if link.sender == (0, name)]
    assert [link.quota for link in ends] == [1]


@pytest.mark.parametrize("options", [CompileOptions(), CompileOptions(boxing_thread=True)])
def test_unfolded_firings_are_those_of_all_ranks_with_each_group_together(
    options: CompileOptions,
) -> None:
    plan = pipeline_plan(3, (2, 1), mesh=_GRID, options=options)
    folded = fold(plan)
    alone = fold(plan, {part.rank: part.rank for part in plan.ranks})
    chosen = [one for one in firings_of(alone.plan) if one[0] in folded.members]

    firings = list(folded.unfolded(chosen))

    assert sorted(firings) == sorted(firings_of(plan))
    at = 0
    while at < len(firings):
        rank, name = firings[at]
        actor = plan.by_rank[rank].by_name[name]
        group = plan.steps[actor.step].group(rank) if isinstance(actor, Collective) else (rank,)
        assert firings[at : at + len(group)] == [(other, name) for other in group]
        at += len(group)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("in_flight", [(2, 1), (4, 4)])
@pytest.mark.parametrize(
    "options",
    [CompileOptions(), CompileOptions(boxing_thread=True), CompileOptions(overlap=True)],
    ids=["one thread", "boxing thread", "overlap"],
)
@pytest.mark.parametrize("batch", [8, 6])
def test_folded_plans_are_ordered_and_checked_as_all_ranks_are(
    in_flight: tuple[int, ...],
    options: CompileOptions,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folded = pipeline_plan(4, in_flight, mesh=_GRID, options=options, batch=batch)
    report = check(folded)

    monkeypatch.setattr(order, "fold", _rank_by_rank)
    monkeypatch.setattr(check_module, "fold", _rank_by_rank)
    plan = pipeline_plan(4, in_flight, mesh=_GRID, options=options, batch=batch)

    assert folded == plan
    assert check(plan) == report


def _edited_quota(part: RankPlan) -> RankPlan:
    return replace(part, registers=tuple(replace(one, quota=9) for one in part.registers))


def _edited_order(part: RankPlan) -> RankPlan:
    order = list(part.orders["compute"])
    at = next(i for i, (name, _) in enumerate(order) if name.startswith("optimizer"))
    return replace(part, orders={"compute": (order.pop(at), *order)})


def _edited_time(part: RankPlan) -> RankPlan:
    first, *others = part.actors
    return replace(part, actors=(replace(first, time_s=1.0), *others))


def _edited_slot(part: RankPlan) -> RankPlan:
    first, *others = part.slots
    return replace(part, slots=(replace(first, local_shape=(1, 1)), *others))


def _without_a_register(part: RankPlan) -> RankPlan:
    return replace(part, registers=part.registers[1:])


def _overwriting_nothing(part: RankPlan) -> RankPlan:
    actors = (replace(one, in_place=()) if one.writes else one for one in part.actors)
    return replace(part, actors=tuple(actors))


@pytest.mark.parametrize(
    ("edit", "is_right"),
    [
        (_edited_quota, True),
        (_edited_time, True),
        (_overwriting_nothing, False),
        (_edited_order, False),
        (_edited_slot, False),
        (_without_a_register, False),
    ],
)
@pytest.mark.parametrize("rank", [0, 2, 7])
def test_an_edited_rank_is_of_no_class_and_judged_by_itself(
    edit: Callable[[RankPlan], RankPlan],
    is_right: bool,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)
    (edited,) = (edit(part) for part in plan.ranks if part.rank == rank)
    changed = replace(plan, ranks=tuple(edited if p.rank == rank else p for p in plan.ranks))

    said = _verdict(changed)
    monkeypatch.setattr(check_module, "fold", _rank_by_rank)

    assert (rank,) in _classes(changed)
    assert (said == changed) == is_right
    assert said == _verdict(changed)


def _verdict(plan: PhysicalPlan) -> object:
    """Return what is said of a plan: itself if it is right, else what does not hold."""
    try:
        report = check(plan, types=False)
    except PlanError as error:
        return error.what
    assert report.latency_s
    return report.plan


def test_a_rank_with_another_order_is_replayed_by_itself() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=_GRID)
    ((thread, firings),) = plan.by_rank[2].orders.items()

    swapped = _changed(plan, 2, orders={thread: (*firings[2:], *firings[:2])})

    with pytest.raises(PlanError):
        check(swapped)


def test_shapes_of_shards_tell_ranks_apart_where_a_step_is_uneven() -> None:
    mesh = Placement.grid((2,), ("data",))

    def shapes(extent: int) -> Mapping[int, Hashable]:
        whole, cut = (mesh, NdSbp.parse("B")), (mesh, NdSbp.parse("S(0)"))
        return shard_shapes(route((extent,), "float32", whole, cut).steps)

    assert shapes(4)[0] == shapes(4)[1]
    assert shapes(5)[0] != shapes(5)[1]


def test_shapes_tell_who_keeps_a_value_from_who_fills_up_with_zeros() -> None:
    mesh = Placement.grid((2,), ("data",))

    steps = route((4,), "float32", (mesh, NdSbp.parse("B")), (mesh, NdSbp.parse("P"))).steps

    assert shard_shapes(steps)[0] != shard_shapes(steps)[1]
