from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.compile import CompileOptions
from sbp_core.compile.actors import Collective
from sbp_core.compile.order import order_firings
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import PlanError
from sbp_core.graph.ir import repetitions
from sbp_core.placement import Placement
from sbp_core.testing.plans import data_parallel_plan, pipeline_plan

_COUNTS = range(2, 7)


def _schedule(plan: PhysicalPlan, rank: int) -> list[str]:
    """Return the compute firings of a rank: F0, F1, B0, ..."""
    letters = {"forward": "F", "backward": "B"}
    return [
        f"{letters[name.split('.')[0]]}{index}"
        for name, index in plan.by_rank[rank].orders["compute"]
        if name.split(".")[0] in letters
    ]


def _one_forward_one_backward(num_micro_batches: int, in_flight: int) -> list[str]:
    """Return the textbook order: `in_flight` forwards, then one backward and one forward each."""
    order = [f"F{index}" for index in range(min(in_flight, num_micro_batches))]
    for index in range(num_micro_batches):
        order.append(f"B{index}")
        if index + in_flight < num_micro_batches:
            order.append(f"F{index + in_flight}")
    return order


@pytest.mark.parametrize("count", _COUNTS)
def test_quotas_of_stages_minus_stage_give_one_forward_one_backward(count: int) -> None:
    plan = pipeline_plan(count, (2, 1))

    for rank, in_flight in enumerate((2, 1)):
        assert _schedule(plan, rank) == _one_forward_one_backward(count, in_flight)


@pytest.mark.parametrize("count", _COUNTS)
def test_quotas_of_all_micro_batches_give_gpipe(count: int) -> None:
    plan = pipeline_plan(count, (count, count))

    gpipe = [f"{letter}{index}" for letter in "FB" for index in range(count)]
    assert [_schedule(plan, rank) for rank in (0, 1)] == [gpipe, gpipe]


@pytest.mark.parametrize("count", _COUNTS)
def test_three_stages_give_one_forward_one_backward(count: int) -> None:
    plan = pipeline_plan(count, (3, 2, 1), widths=(4, 4, 4, 4))

    for rank, in_flight in enumerate((3, 2, 1)):
        assert _schedule(plan, rank) == _one_forward_one_backward(count, in_flight)


@pytest.mark.parametrize("boxing_thread", [False, True])
def test_a_loss_of_another_stage_is_received_when_all_else_is_done(boxing_thread: bool) -> None:
    options = CompileOptions(boxing_thread=boxing_thread)

    plan = pipeline_plan(4, (3, 2, 1), widths=(4, 4, 4, 4), options=options)

    thread = "boxing" if boxing_thread else "compute"
    for rank, stage in ((0, 0), (1, 1)):
        names = [name for name, _ in plan.by_rank[rank].orders[thread]]
        last = names[: names.index("vote to commit")][-1]
        assert last == f"receive sum.mean@{stage}(B)"
    sends = [name for name, _ in plan.by_rank[2].orders[thread] if name.startswith("send sum")]
    assert sends == ["send sum.mean@0(B)", "send sum.mean@1(B)"]


@pytest.mark.parametrize("quotas", [(2, 1), (4, 4)])
@pytest.mark.parametrize("boxing_thread", [False, True])
def test_collectives_come_in_one_order_on_all_ranks_of_a_group(
    quotas: tuple[int, int], boxing_thread: bool
) -> None:
    mesh = Placement.grid((2, 2), ("pipe", "data"))

    plan = pipeline_plan(4, quotas, mesh=mesh, options=CompileOptions(boxing_thread=boxing_thread))

    orders: dict[tuple[int, ...], set[tuple[tuple[str, int], ...]]] = {}
    for part in plan.ranks:
        collectives = {a.name: a for a in part.actors if isinstance(a, Collective)}
        found: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for order in part.orders.values():
            for name, index in order:
                if name in collectives:
                    group = plan.steps[collectives[name].step].group(part.rank)
                    found.setdefault(group, []).append((name, index))
        for group, firings in found.items():
            orders.setdefault(group, set()).add(tuple(firings))
    assert orders
    assert all(len(alternatives) == 1 for alternatives in orders.values())


def test_every_actor_is_listed_for_each_of_its_firings_in_turn() -> None:
    plan = pipeline_plan(3, (2, 1))

    for part in plan.ranks:
        for actor in part.actors:
            indices = [index for name, index in part.orders[actor.thread] if name == actor.name]
            assert indices == list(range(actor.num_firings(repetitions(3, 1))))


def test_a_gradient_is_sent_before_the_next_forward_begins() -> None:
    order = pipeline_plan(4, (2, 1)).by_rank[1].orders["compute"]

    for index in range(3):
        sent = order.index(("send layers.1.grad.mm_1@0(B)", index))
        assert order.index(("backward.1.1", index)) < sent < order.index(("forward.1.1", index + 1))


def test_ordering_again_changes_nothing() -> None:
    plan = data_parallel_plan()

    assert order_firings(plan).hash == plan.hash


def _without_quotas(plan: PhysicalPlan, *names: str) -> PhysicalPlan:
    """Return the plan with no place in some registers; in all of them if none is named."""
    ranks = tuple(
        replace(
            part,
            registers=tuple(
                replace(r, quota=0) if not names or r.name in names else r for r in part.registers
            ),
        )
        for part in plan.ranks
    )
    return replace(plan, ranks=ranks)


def test_quotas_that_admit_no_order_are_refused_with_the_cycle_and_larger_ones() -> None:
    plan = _without_quotas(pipeline_plan(2, (2, 1)), "forward.0.0#0")

    with pytest.raises(PlanError, match="the quotas admit no firing order") as caught:
        order_firings(plan)

    cycle = " ".join(caught.value.where)
    forward = "stage 0's forward.0.0 of micro-batch 0 on rank 0"
    assert f"{forward} waits for credit of register forward.0.0#0 of rank 0" in cycle
    assert f"waits for data of {forward}" in cycle
    assert caught.value.todo == (
        "raise the quota of register forward.0.0#0 of rank 0 from 0 to 1; "
        "registers have theirs from in_flight of their stage"
    )


def test_of_many_quotas_that_are_too_small_the_first_are_named() -> None:
    plan = _without_quotas(pipeline_plan(2, (2, 1)))

    with pytest.raises(PlanError, match="the quotas admit no firing order") as caught:
        order_firings(plan)

    assert ", and 16 more; " in caught.value.todo


def test_the_quota_of_a_sum_counts_sums() -> None:
    plan = _without_quotas(pipeline_plan(2, (2, 1)), "accumulate.weight_gradient.1.1#0")

    with pytest.raises(PlanError, match="the quotas admit no firing order") as caught:
        order_firings(plan)

    # However many micro-batches are in it, it is one filling.
    assert "accumulate.weight_gradient.1.1#0 of rank 1 from 0 to 1; " in caught.value.todo
