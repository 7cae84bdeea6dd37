"""Problems of any structure: the planted assignment fits, and the solver finds one that does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.choice import FAMILIES, Shape, evaluate, planted_problem, solve, solver

shapes = st.builds(
    Shape,
    nodes=st.integers(1, 60),
    degree=st.floats(0, 4),
    reach=st.integers(0, 20),
    mirrored=st.floats(0, 1),
    strategies=st.integers(1, 10),
    single=st.floats(0, 1),
    forbidden=st.floats(0, 0.9),
    held=st.floats(0, 1),
    slack=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    frugal=st.floats(0, 1),
    ballast=st.sampled_from([0.0, 0.9, 1.0]),
)


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 99))
def test_an_assignment_is_found_where_one_was_planted(shape, seed):
    problem, planted = planted_problem(shape, seed)
    known = evaluate(problem, planted)

    solution = solve(problem, time_limit_s=20, gap=0.01)

    assert known.feasible
    assert solution.assignment is not None
    assert evaluate(problem, solution.assignment).cost == solution.cost
    assert solution.bound <= known.cost
    assert solution.cost <= known.cost / 0.99 + 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("family", ["tight", "forbidden", "long"])
def test_the_search_alone_finds_one_too(family, monkeypatch):
    monkeypatch.setattr(solver, "_FEW_PAIRS", -1)
    problem, planted = planted_problem(replace(FAMILIES[family], nodes=50))

    solution = solve(problem, time_limit_s=20, gap=0.02)

    assert solution.cost <= evaluate(problem, planted).cost


def test_ballast_makes_memory_as_tight_at_every_time_as_at_the_peak():
    shape = Shape(nodes=30, slack=0.0, ballast=1.0)
    problem, planted = planted_problem(shape)

    assert problem.intervals is not None and problem.usages is not None
    for time in range(max(end for _, end in problem.intervals)):
        held = sum(
            int(own[s])
            for own, s, (start, end) in zip(problem.usages, planted, problem.intervals, strict=True)
            if start <= time < end
        )
        assert held == problem.usage_limit


def test_edges_are_a_chain_and_reach_no_farther_back_than_asked_for():
    problem, _ = planted_problem(Shape(nodes=40, degree=3.0, reach=5))

    assert set(pairwise(range(40))) <= set(problem.edges)
    assert 2 <= max(v - u for u, v in problem.edges) <= 6


def test_a_seed_makes_the_same_problem_again():
    first, second, other = (planted_problem(Shape(nodes=20), seed)[0] for seed in (1, 1, 2))

    assert all(map(np.array_equal, first.costs, second.costs))
    assert not all(map(np.array_equal, first.costs, other.costs))


def test_a_shape_that_cannot_be_is_refused():
    with pytest.raises(SbpValueError, match="forbidden=1"):
        Shape(nodes=3, forbidden=1.0)
