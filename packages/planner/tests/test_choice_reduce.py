"""Reductions, memory rows, messages and pruning keep the optimum and never bound it wrongly."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import inf

import numpy as np
import pytest
from choice_problems import brute_force, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.choice import ChoiceProblem, evaluate, reduce
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.iopddl.synthetic import transformer_problem
from sbp_planner.choice.large.dual import DualAscent
from sbp_planner.choice.large.neighbourhood import Neighbourhoods
from sbp_planner.choice.problem import memory_rows
from sbp_planner.choice.program import solve_program
from sbp_planner.choice.reduce import reduce_further, reduce_problem
from sbp_planner.choice.reduced_graph import NothingAllowedError


def best_of(compact):
    """Return the least cost of what reductions left, by trying everything."""
    every = product(*(range(int(size)) for size in compact.sizes))
    costs = [
        compact.total(values)
        for values in (np.array(chosen, dtype=np.int64) for chosen in every)
        if compact.fits(values)
    ]
    return min(costs, default=inf)


def left(problem, deadline=inf):
    """Return graph, compact problem and nodes; None if nothing is allowed."""
    try:
        graph = reduce_problem(problem, deadline)
    except NothingAllowedError:
        return None
    return (graph, *compacted(graph))


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_reductions_keep_the_optimum_and_lead_back_to_it(problem, stopped):
    best = brute_force(problem)

    found = left(problem, -inf if stopped else inf)

    if found is None:
        assert best == inf
        return
    graph, compact, nodes = found
    assert best_of(compact) == pytest.approx(best)
    for chosen in product(*(range(int(size)) for size in compact.sizes)):
        values = np.array(chosen, dtype=np.int64)
        extended = graph.extend(dict(zip(nodes, chosen, strict=True)))
        cost = compact.total(values) if compact.fits(values) else inf
        assert evaluate(problem, extended).cost == pytest.approx(cost)
        assert graph.project(extended) == dict(zip(nodes, chosen, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_what_is_beaten_is_what_comparing_everything_says(size, width, seed):
    random = np.random.default_rng(seed)
    better = random.random((size, size, width)) < 0.6
    better[np.eye(size, dtype=bool)] = False
    places = np.nonzero(better.any(axis=2) | (random.random((size, size)) < 0.3))

    beaten = reduce._beaten(places, better[places], size)

    # Of two that are as good as each other, the first stays.
    expected = [
        [
            any(better[s, t, r] and not (t > s and better[t, s, r]) for t in range(size))
            for r in range(width)
        ]
        for s in range(size)
    ]
    assert beaten.tolist() == expected


def test_strategies_of_wide_nodes_that_others_beat_are_dropped():
    count = 140
    random = np.random.default_rng(0)
    table = random.random((count, count)) * 10
    dear = np.where(np.arange(count) < 5, 0.0, 30.0)
    problem = ChoiceProblem(
        costs=[dear, dear],
        usages=[np.arange(1, count + 1)] * 2,
        edges=[(0, 1)],
        edge_costs=[table],
        usage_limit=200,
    )

    _, compact, _ = left(problem)

    assert compact.sizes.max(initial=0) <= 5


def test_a_chain_without_memory_is_reduced_to_nothing():
    random = np.random.default_rng(0)
    problem = ChoiceProblem(
        costs=[random.random(4) for _ in range(50)],
        edges=[(i, i + 1) for i in range(49)],
        edge_costs=[random.random((4, 4)) for _ in range(49)],
    )

    assert left(problem)[2] == []


def test_a_node_that_follows_brings_its_memory_along():
    follow = np.where(np.eye(2) > 0, 0.0, inf)
    problem = ChoiceProblem(
        costs=[np.array([0.0, 5.0]), np.zeros(2), np.array([0.0, 9.0])],
        usages=[[4, 1], [4, 1], [4, 0]],
        edges=[(0, 1)],
        edge_costs=[follow],
        usage_limit=9,
    )

    graph, compact, nodes = left(problem)

    assert len(nodes) == 2
    assert compact.capacity.tolist() == [7]
    assert graph.extend({nodes[0]: 1, nodes[1]: 0}) == [1, 1, 0]


def test_what_does_not_fit_beside_the_least_of_others_is_dropped():
    # Beside node 1, which holds 3 at least, node 0 cannot hold 5 of 7; then node 1 may hold 6.
    problem = ChoiceProblem(
        costs=[np.array([0.0, 5.0]), np.array([0.0, 5.0])],
        usages=[[5, 1], [6, 3]],
        usage_limit=7,
    )

    graph, compact, nodes = left(problem)

    assert (nodes, compact.constant) == ([], 5.0)
    assert graph.extend({}) == [1, 0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=7))
def test_the_nodes_of_any_time_are_together_at_some_row(intervals):
    times, spans = memory_rows(intervals)

    at_rows = [{i for i, (a, b) in enumerate(spans) if a <= row < b} for row in range(len(times))]
    for time in range(9):
        live = {i for i, (start, end) in enumerate(intervals) if start <= time < end}
        assert not live or any(live <= row for row in at_rows)
    for row, time in enumerate(times):
        assert at_rows[row] == {i for i, (a, b) in enumerate(intervals) if a <= time < b}


@settings(max_examples=40, deadline=None)
@given(problems(max_nodes=7), st.integers(1, 12))
def test_bounds_of_messages_hold_and_pruning_keeps_the_best(problem, sweeps):
    found = left(problem, -inf)
    if found is None:
        return
    graph, compact, nodes = found
    best = best_of(compact)
    dual = DualAscent(compact)

    for _ in range(sweeps):
        dual.sweep()
        assert dual.bound <= best + 1e-6
        dual.move_prices(best)

    if best < inf:
        dual.sweep()
        room = best - dual.last_bound + 1e-6
        reduced = dual.reduced_costs()
        strategies = np.split(reduced.nodes <= room, compact.first[1:-1])
        split = np.split(reduced.pairs <= room, compact.flat.first[1:-1])
        pairs = [own.reshape(t.shape) for own, t in zip(split, compact.tables, strict=False)]
        edges = [(nodes[u], nodes[v]) for u, v in compact.edges]
        pruned = reduce_further(
            graph,
            dict(zip(nodes, strategies, strict=True)),
            dict(zip(edges, pairs, strict=True)),
            inf,
        )
        assert best_of(compacted(pruned)[0]) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(problems(max_nodes=7))
def test_the_integer_program_alone_equals_trying_everything(problem):
    found = left(problem, -inf)
    if found is None:
        return
    bounds = []

    result = solve_program(found[1], inf, on_bound=bounds.append)

    best = best_of(found[1])
    assert result.optimal
    assert all(bound <= best for bound in bounds)
    if best == inf:
        assert (result.values, result.bound) == (None, inf)
    else:
        assert found[1].total(result.values) == pytest.approx(best)
        assert found[1].fits(result.values)


def test_an_elastic_program_exceeds_by_the_least():
    # Reduced, the nodes may hold 12 of 4 x 4 bytes beyond what they hold anyway.
    _, compact, _ = left(
        ChoiceProblem(costs=[np.array([0.0, 9.0])] * 4, usages=[[10, 6]] * 4, usage_limit=36)
    )
    tight = replace(compact, capacity=compact.capacity - 13)

    result = solve_program(tight, inf, elastic=True)

    assert tight.excess(result.values).max() == 1


def test_neighbourhoods_make_the_worst_assignment_fit():
    problem = transformer_problem(3, seed=5, slack=0.02)
    _, compact, _ = left(problem)
    worst = np.array([int(compact.cost[a:b].argmax()) for a, b in pairwise(compact.first)])
    near = Neighbourhoods(compact, worst)
    assert not near.fits

    for _ in range(30):
        near.step(inf)
        if near.fits:
            break

    assert near.fits
    assert compact.fits(near.values)
    assert compact.total(near.values) < inf
