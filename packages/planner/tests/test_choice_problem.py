"""A choice problem refuses what does not belong together, and prices assignments exactly."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from choice_problems import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.choice import ChoiceProblem, evaluate

TWO = {"costs": [np.zeros(2), np.zeros(2)]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": [np.zeros(0)]}, "node 0 has no strategy"),
        ({"costs": [np.array([np.nan])]}, "costs\\[0\\] has the cost NaN"),
        ({"costs": [np.array([-inf])]}, "costs\\[0\\] has the cost NaN or -inf"),
        ({"costs": [np.zeros((1, 1))]}, "costs\\[0\\] has shape"),
        ({"costs": [["a"]]}, "costs\\[0\\] is \\['a'\\]"),
        ({"edges": [(0, 2)], "edge_costs": [np.zeros((2, 2))]}, "edges\\[0\\] is \\(0, 2\\)"),
        ({"edges": [(0, 1)]}, "1 edges and 0 edge_costs"),
        ({"edges": [(0, 1)], "edge_costs": [np.zeros((2, 3))]}, "edge_costs\\[0\\], of edge"),
        ({"usages": [[1, 2]]}, "1 usages and 2 nodes"),
        ({"usages": [[1, 2], [1]]}, "usages\\[1\\] has 1 entries"),
        ({"usages": [[1, 2], [1, 0.5]]}, "usages\\[1\\] has 0.5"),
        ({"usages": [[1, 2], [1, -5]]}, "usages\\[1\\] has -5"),
        ({"intervals": [(0, 1)]}, "1 intervals and 2 nodes"),
        ({"intervals": [(0, 1), (-1, 1)]}, "intervals\\[1\\] is"),
        ({"usage_limit": np.nan}, "usage_limit is NaN"),
        ({"ties": [(0, 7)]}, "ties\\[0\\] is \\(0, 7\\)"),
        ({"costs": [np.zeros(2), np.zeros(3)], "ties": [(0, 1)]}, "have \\[2, 3\\] strategies"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, words):
    with pytest.raises(SbpValueError, match=words):
        ChoiceProblem(**{**TWO, **change})


def test_nodes_without_intervals_all_live_at_once():
    problem = ChoiceProblem(**TWO, usages=[[3, 1], [4, 1]], usage_limit=6)

    assert evaluate(problem, [0, 0]).peak_usage == 7
    assert not evaluate(problem, [0, 0]).feasible
    assert evaluate(problem, [1, 0]).cost == 0


def test_intervals_are_half_open_and_may_be_empty():
    problem = ChoiceProblem(
        costs=[np.zeros(1)] * 3,
        usages=[[3], [4], [100]],
        intervals=[(0, 2), (2, 3), (1, 1)],
        usage_limit=4,
    )

    found = evaluate(problem, [0, 0, 0])

    assert (found.peak_usage, found.peak_time, found.feasible) == (4, 2, True)


def test_an_evaluation_says_why_nothing_is_allowed():
    problem = ChoiceProblem(
        costs=[np.array([0.0, inf]), np.zeros(2)],
        usages=[[9, 0], [0, 0]],
        usage_limit=5,
        ties=[(0, 1)],
    )

    assert "forbidden" in evaluate(problem, [1, 0]).reason
    assert "9 bytes are held at time 0, the limit is 5" in evaluate(problem, [0, 0]).reason


def test_broken_ties_cost_inf():
    assert "tied" in evaluate(ChoiceProblem(**TWO, ties=[(0, 1)]), [0, 1]).reason


def test_an_assignment_of_the_wrong_length_or_range_is_refused():
    problem = ChoiceProblem(**TWO)

    with pytest.raises(SbpValueError, match="1 entries"):
        evaluate(problem, [0])
    with pytest.raises(SbpValueError, match="strategy 2 for node 1"):
        evaluate(problem, [0, 2])


@settings(max_examples=40, deadline=None)
@given(problems(), st.data())
def test_an_evaluation_is_the_sum_over_every_time(problem, data):
    chosen = [data.draw(st.integers(0, size - 1)) for size in problem.sizes]
    usage = [int(own[s]) for own, s in zip(problem.usages, chosen, strict=True)]
    held = [
        sum(u for u, (a, b) in zip(usage, problem.intervals, strict=True) if a <= t < b)
        for t in range(7)
    ]
    cost = sum(c[s] for c, s in zip(problem.costs, chosen, strict=True))
    cost += sum(
        table[chosen[u], chosen[v]]
        for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True)
    )
    tied = all(len({chosen[i] for i in tie}) <= 1 for tie in problem.ties)

    found = evaluate(problem, chosen)

    assert found.peak_usage == max(held)
    assert found.feasible == (cost < inf and max(held) <= problem.usage_limit and tied)
    assert found.cost == (cost if found.feasible else inf)
