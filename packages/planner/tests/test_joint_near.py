"""Signatures near what was found, where all of them are too many."""

from random import Random

import numpy as np
import pytest
from plan_requests import assert_legal
from random_steps import CUBE, random_request

from sbp_core.infer import LeastPrices, StepProblem, joint_problem
from sbp_core.sbp import P
from sbp_planner import ilp
from sbp_planner.joint import near as nearness
from sbp_planner.joint.layers import tie
from sbp_planner.joint.near import least_s, limited, near, recentred, with_prices
from sbp_planner.search_configs import IlpConfig


def asked(seed):
    return random_request(Random(seed), meshes=CUBE, max_ops=1)


def distance(one, other):
    return sum(a != b for a, b in zip(one, other, strict=True))


def has_maxima(one):
    return any(P("max") in part.inputs or P("min") in part.inputs for part in one)


def test_what_stays_differs_on_one_axis_at_most_and_all_of_that_stays_but_maxima():
    problem = joint_problem(asked(1))

    kept = near(problem, ties=())

    for name, variable in problem.node_variable.items():
        parts = problem.parts[name]
        centre = parts[problem.start[variable]]
        close = [
            at for at, one in enumerate(parts) if distance(one, centre) <= 1 and not has_maxima(one)
        ]
        assert not has_maxima(centre)
        assert kept[variable].tolist() == close
        assert 1 < len(close) < len(parts)


def test_variables_that_are_alike_keep_what_is_near_any_of_them():
    problem = joint_problem(asked(1))
    first = problem.storage_variable["x"]
    problem.start[first] = 0
    alone = near(problem, ties=())[first]
    problem.start[first] = problem.sizes[first] - 1
    other = near(problem, ties=())[first]

    kept = near(problem, ties=[(first,)])[first]

    assert set(kept) == set(other) != set(alone)
    assert 0 in alone


@pytest.mark.slow
def test_a_limited_problem_means_and_costs_what_the_whole_one_does():
    whole, part = (joint_problem(asked(2)) for _ in range(2))
    kept = near(part, ties=())
    random = Random(0)

    assert not limited(part)
    assert limited(part, tied=False, max_prices=0)

    assert part.num_prices < whole.num_prices
    for _ in range(50):
        values = [random.randrange(size) for size in part.sizes]
        same = [int(of[value]) for of, value in zip(kept, values, strict=True)]
        assert part.decided(values) == whole.decided(same)
        assert part.cost(values) == pytest.approx(whole.cost(same))
    assert part.decided(part.start) == whole.decided(whole.start)


def test_around_another_assignment_its_neighbours_are_looked_at():
    problem = joint_problem(asked(2))
    limited(problem, tied=False, max_prices=0)
    values = [size - 1 for size in problem.sizes]

    moved = recentred(problem, values, tied=False)

    assert moved.decided(moved.start) == problem.decided(values)
    assert moved.cost(moved.start) == pytest.approx(problem.cost(values))
    assert moved.prices is problem.prices


@pytest.mark.slow
def test_conversions_that_are_priced_cost_what_they_do_and_others_the_least_they_may():
    problem = joint_problem(asked(2))
    limited(problem, tied=False, max_prices=0)
    whole = joint_problem(asked(2))
    kept = near(joint_problem(asked(2)), ties=())
    least = StepProblem(
        whole.work,
        whole.decided(whole.start),
        whole.axes,
        whole.pins,
        prices=LeastPrices(whole.work.placements, whole.work.cluster),
    )

    step = tie(least, with_prices(least, problem), tied=False)

    random = Random(0)
    for _ in range(50):
        values = [random.randrange(size) for size in problem.sizes]
        same = [int(of[value]) for of, value in zip(kept, values, strict=True)]
        anywhere = [random.randrange(size) for size in whole.sizes]
        # Of a scalar nothing is known.
        known = sum(
            g.cost(values) for g in problem.groups if problem.work.graph.tensor(g.value).shape
        )
        unary = problem.cost(values) - sum(group.cost(values) for group in problem.groups)
        assert step_cost(step, same) == pytest.approx(unary + known)
        assert step_cost(step, anywhere) <= whole.cost(anywhere) * (1 + 1e-9)


def step_cost(step, values):
    seconds = sum(table[value] for table, value in zip(step.unary, values, strict=True))
    return float(seconds + sum(group.cost(values) for group in step.groups))


def check_bound_of_all(monkeypatch, seed):
    """Plan with all signatures, and near what is found axis by axis."""
    request = asked(seed)
    best = ilp.IlpPlanner(IlpConfig(tied=False)).plan(request)
    monkeypatch.setattr(nearness, "MAX_PRICES", 100)
    fastest = sum(table.min() for table in joint_problem(request).unary)

    found = ilp.IlpPlanner(IlpConfig(tied=False)).plan(request)

    report = found.report
    assert_legal(request.graph, found)
    assert fastest <= report["bound_s"] * (1 + 1e-9)
    assert report["bound_s"] <= best.report["cost_s"] * (1 + 1e-9)
    assert best.report["cost_s"] <= report["cost_s"] * (1 + 1e-9)
    assert report["cost_s"] <= report["cost_by_axis_s"] * (1 + 1e-9)
    assert np.isclose(report["bound_near_s"], report["cost_s"])
    assert "signatures are too many" in report["explanation"][1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 8])
def test_near_what_was_found_there_is_a_plan_and_a_bound_of_all_plans(monkeypatch, seed):
    check_bound_of_all(monkeypatch, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_the_bound_of_all_plans_is_below_the_best_of_all(monkeypatch, seed):
    check_bound_of_all(monkeypatch, seed)


def test_without_time_the_bound_is_a_bound_all_the_same():
    problem = joint_problem(asked(4))
    limited(problem, tied=True, max_prices=0)
    cost = problem.cost(problem.start)

    early, late = (least_s(problem, cost, tied=True, time_limit_s=s) for s in (0.0, np.inf))

    assert 0 < early <= late <= cost
