"""Arc consistency and trying find what is allowed, and say when nothing is."""

from __future__ import annotations

import time
from itertools import product
from math import inf

import numpy as np
from choice_problems import problems
from hypothesis import given, settings

from sbp_planner.choice import ChoiceProblem
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.large.consistent import consistent
from sbp_planner.choice.reduce import reduce_problem
from sbp_planner.choice.reduced_graph import NothingAllowedError


def planted(count: int, strategies: int, density: float, forbidden: float) -> ChoiceProblem:
    """Return a dense problem of which one assignment is allowed, most likely no other."""
    random = np.random.default_rng(0)
    hidden = random.integers(0, strategies, count)
    edges = [(u, v) for u in range(count) for v in range(u + 1, count) if random.random() < density]
    tables = []
    for u, v in edges:
        table = random.integers(0, 1000, (strategies, strategies)).astype(float)
        kept = table[hidden[u], hidden[v]]
        table[random.random(table.shape) < forbidden] = inf
        table[hidden[u], hidden[v]] = kept
        tables.append(table)
    return ChoiceProblem(
        costs=[random.integers(0, 1000, strategies).astype(float) for _ in range(count)],
        usages=[random.integers(1, 1000, strategies) for _ in range(count)],
        edges=edges,
        edge_costs=tables,
        usage_limit=1000 * count,
    )


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=6, memory=False))
def test_what_is_found_is_allowed_and_none_means_that_nothing_is(problem):
    try:
        compact, nodes = compacted(reduce_problem(problem, -inf))
    except NothingAllowedError:
        return
    if not nodes:
        return

    values = consistent(compact, compact.cost, inf)

    if values is None:
        every = product(*(range(size) for size in compact.sizes))
        assert all(compact.total(np.array(v)) == inf for v in every)
    else:
        assert compact.total(values) < inf


def test_time_that_is_up_is_kept_to():
    compact, _ = compacted(reduce_problem(planted(12, 3, 0.5, 0.3), -inf))

    assert consistent(compact, compact.cost, time.monotonic() - 1) is None


def test_a_dense_problem_with_one_solution_is_solved():
    compact, _ = compacted(reduce_problem(planted(50, 10, 0.6, 0.4), -inf))

    values = consistent(compact, compact.cost, time.monotonic() + 60)

    assert values is not None
    assert compact.total(values) < inf
