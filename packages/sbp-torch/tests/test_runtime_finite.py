from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from sbp_core.compile import COMMIT, PhysicalPlan
from sbp_core.runtime import NotFiniteStepError
from sbp_torch.runtime import not_finite, undo_limits, undone_error
from sbp_torch.testing.cases import compile_case


@cache
def overwriting(name: str) -> PhysicalPlan:
    """Return the plan whose states are overwritten."""
    return compile_case(name, in_place_states=True)


@pytest.mark.parametrize(
    ("results", "name"),
    [
        ({"loss": 1.0, "accuracy": float("nan")}, ""),
        ({}, ""),
        ({"loss": float("nan")}, "loss"),
        ({"loss": float("-inf")}, "loss"),
        ({"loss": 2.0, "grad_norm": float("inf")}, "grad_norm"),
    ],
)
def test_loss_and_norm_have_to_be_finite(results: dict[str, float], name: str) -> None:
    tensors = {key: torch.tensor(value) for key, value in results.items()}

    assert not_finite(tensors) == name


def test_the_error_has_the_results_and_what_is_wrong() -> None:
    error = undone_error({"loss": torch.tensor(float("nan"))}, 4)

    assert isinstance(error, NotFiniteStepError)
    assert error.what == "loss is nan"
    assert error.outputs["loss"].isnan()


def test_one_rank_can_undo_until_it_overwrites_a_state() -> None:
    plan = overwriting("one rank")
    ((thread, moment),) = undo_limits(plan).items()

    firings = [plan.by_rank[0].by_name[name] for name, _ in plan.by_rank[0].orders[thread[1]]]
    before, after = firings[:moment], firings[moment:]
    assert not any(actor.in_place for actor in before)
    assert after[0].in_place
    assert "loss" in {name for actor in before for name, _ in actor.emits}


def without_commit(plan: PhysicalPlan) -> PhysicalPlan:
    """Return the plan whose ranks do not commit together."""
    ranks = []
    for part in plan.ranks:
        orders = {
            thread: tuple(one for one in order if one[0] != COMMIT)
            for thread, order in part.orders.items()
        }
        actors = tuple(actor for actor in part.actors if actor.name != COMMIT)
        ranks.append(replace(part, actors=actors, orders=orders))
    return replace(plan, ranks=tuple(ranks))


def test_ranks_can_undo_until_they_have_committed() -> None:
    plan = overwriting("data parallel")

    for (rank, thread), moment in undo_limits(plan).items():
        order = plan.by_rank[rank].orders[thread]
        assert order[moment - 1][0] == COMMIT
        assert not any(plan.by_rank[rank].by_name[name].in_place for name, _ in order[:moment])


def every_firing(plan: PhysicalPlan) -> dict[tuple[int, str], int]:
    return {
        (part.rank, thread): len(order)
        for part in plan.ranks
        for thread, order in part.orders.items()
    }


@pytest.mark.slow
def test_where_ranks_have_several_threads_one_may_overwrite_before_another_knows_the_loss() -> None:
    plan = overwriting("boxing threads")

    assert undo_limits(plan) == every_firing(plan)


def test_a_loss_that_is_made_behind_the_first_update_comes_too_late() -> None:
    plan = overwriting("one rank")
    (part,) = plan.ranks
    ((thread, order),) = part.orders.items()
    makes_loss = {a.name for a in part.actors if "loss" in {name for name, _ in a.emits}}
    order = tuple(sorted(order, key=lambda firing: firing[0] in makes_loss))  # to the end
    late = replace(plan, ranks=(replace(part, orders={thread: order}),))

    assert undo_limits(late) == {(0, thread): len(order)}


@pytest.mark.slow
def test_where_nothing_is_overwritten_a_step_can_be_undone_to_its_end() -> None:
    plan = compile_case("accumulation", in_place_states=False)

    assert undo_limits(plan) == every_firing(plan)


def test_ranks_that_do_not_commit_together_cannot_undo_what_one_overwrites() -> None:
    plan = without_commit(overwriting("data parallel"))

    assert undo_limits(plan) == every_firing(plan)
