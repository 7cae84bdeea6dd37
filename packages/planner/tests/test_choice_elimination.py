"""Elimination equals the integer program on narrow graphs without memory, and knows wide ones."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from choice_problems import problems
from hypothesis import given, settings

from sbp_planner.choice import ChoiceProblem, evaluate, solve
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.program import solve_program
from sbp_planner.choice.reduce import reduce_problem
from sbp_planner.choice.solver import eliminated


def grid(height, width, strategies=3, **more):
    random = np.random.default_rng(1)
    place = np.arange(height * width).reshape(height, width)
    edges = [*zip(place[:-1].ravel(), place[1:].ravel(), strict=True)]
    edges += [*zip(place[:, :-1].ravel(), place[:, 1:].ravel(), strict=True)]
    return ChoiceProblem(
        costs=[random.integers(0, 50, strategies).astype(float) for _ in range(place.size)],
        edges=edges,
        edge_costs=[random.integers(0, 50, (strategies,) * 2).astype(float) for _ in edges],
        **more,
    )


def test_a_narrow_grid_is_eliminated_as_the_program_solves_it():
    problem = grid(4, 8)
    compact, _ = compacted(reduce_problem(problem, -inf))

    values = eliminated(compact)

    assert compact.total(values) == pytest.approx(compact.total(solve_program(compact, inf).values))
    solution = solve(problem)
    assert (solution.cost, solution.proved) == (compact.total(values), True)
    assert evaluate(problem, solution.assignment).cost == solution.cost


def test_a_wide_grid_or_memory_is_left_to_others():
    wide = grid(16, 16, strategies=4)
    held = grid(2, 3, usages=[[1, 2, 3]] * 6, usage_limit=9)

    assert eliminated(compacted(reduce_problem(wide, -inf))[0]) is None
    assert eliminated(compacted(reduce_problem(held, -inf))[0]) is None


@settings(max_examples=30, deadline=None)
@given(problems(memory=False))
def test_forbidden_pairs_are_minded(problem):
    solution = solve(problem)

    assert solution.infeasible or evaluate(problem, solution.assignment).feasible
