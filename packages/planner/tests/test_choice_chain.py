"""The dynamic program over a chain equals the trying of everything, in exact bytes."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.choice import ChoiceProblem, solve, solve_chain


def chain(seed, count, largest=9, forbidden=0.2):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, count)

    def table(*shape):
        entries = random.integers(-3, 10, shape).astype(float)
        entries[random.random(shape) < forbidden] = inf
        return entries

    costs = [table(size) for size in sizes]
    usages = [random.integers(0, largest + 1, size) for size in sizes]
    edges = [table(a, b) for a, b in pairwise(sizes)]
    return costs, usages, edges


def cost_and_bytes(costs, usages, edges, chosen):
    cost = sum(c[s] for c, s in zip(costs, chosen, strict=True))
    cost += sum(e[a, b] for e, (a, b) in zip(edges, pairwise(chosen), strict=True))
    return cost, sum(int(u[s]) for u, s in zip(usages, chosen, strict=True))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6), st.integers(-1, 40) | st.none())
def test_a_chain_is_solved_as_by_trying_everything(seed, count, limit):
    costs, usages, edges = chain(seed, count)
    every = [
        cost_and_bytes(costs, usages, edges, chosen)
        for chosen in product(*(range(len(cost)) for cost in costs))
    ]
    fitting = [entry for entry in every if entry[0] < inf and (limit is None or entry[1] <= limit)]

    solution = solve_chain(costs, usages, edges, limit)

    if not fitting:
        assert solution is None
    else:
        assert (solution.cost, solution.usage) == min(fitting)
        found = cost_and_bytes(costs, usages, edges, solution.assignment)
        assert found == (solution.cost, solution.usage)


def test_a_hundred_layers_equal_the_integer_program():
    costs, usages, edges = chain(5, 100, largest=1 << 40, forbidden=0.0)
    limit = sum(int(usage.max() + usage.min()) for usage in usages) // 2
    problem = ChoiceProblem(
        costs=costs,
        usages=usages,
        edges=[(i, i + 1) for i in range(99)],
        edge_costs=edges,
        usage_limit=limit,
    )

    solution = solve_chain(costs, usages, edges, limit)

    assert solution is not None
    assert solve(problem, time_limit_s=30).cost == solution.cost


def test_bytes_are_not_rounded():
    costs, usages = [np.array([0.0, 1.0])] * 2, [np.array([2**50 + 1, 2**50])] * 2
    edge = [np.zeros((2, 2))]

    assert solve_chain(costs, usages, edge, 2**51 + 2).cost == 0
    assert solve_chain(costs, usages, edge, 2**51 + 1).cost == 1
    assert solve_chain(costs, usages, edge, 2**51).cost == 2
    assert solve_chain(costs, usages, edge, 2**51 - 1) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": [np.zeros(2)]}, "1 costs, 2 usages and 1 edge_costs"),
        ({"usages": [np.array([1, -1]), np.zeros(2, int)]}, "usages\\[0\\]"),
        ({"usages": [np.zeros(2), np.zeros(2, int)]}, "whole bytes"),
        ({"edge_costs": [np.zeros((2, 3))]}, "edge_costs\\[0\\] has shape \\(2, 3\\)"),
        ({"costs": [np.array([0.0, np.nan]), np.zeros(2)]}, "costs\\[0\\] has NaN"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(change, words):
    tables = {
        "costs": [np.zeros(2)] * 2,
        "usages": [np.zeros(2, int)] * 2,
        "edge_costs": [np.zeros((2, 2))],
    }

    with pytest.raises(SbpValueError, match=words):
        solve_chain(**{**tables, **change})
