"""Penalties make an assignment fit, and never lose one that does."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.choice import FAMILIES, ChoiceProblem, Shape, planted_problem
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.large.moves import TreeMoves
from sbp_planner.choice.reduce import reduce_problem


def left(problem):
    """Return what is left without reductions."""
    return compacted(reduce_problem(problem, -np.inf))[0]


def penalties(compact, seed=0):
    return TreeMoves(compact, 1e9, usual=1e-3, seed=seed)


def test_what_is_cheap_and_too_large_is_made_to_fit():
    problem = ChoiceProblem(
        costs=[np.array([0.0, 5.0])] * 8, usages=[[4, 1]] * 8, usage_limit=4 * 2 + 6
    )
    compact = left(problem)
    start = np.zeros(8, dtype=np.int64)

    found = penalties(compact).fitted(start, np.zeros(len(compact.capacity)), np.inf)

    assert compact.fits(found)
    assert compact.total(found) >= 6 * 5


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_what_fits_stays_and_no_pair_is_forbidden_in_between(seed, ballast):
    shape = Shape(nodes=20, slack=0.01, held=0.3, forbidden=0.3, ballast=ballast)
    problem, planted = planted_problem(shape, seed)
    compact = left(problem)
    start = np.array(planted)
    prices = np.zeros(len(compact.capacity))
    ways = penalties(compact, seed)

    found = ways.oscillated(start, prices, time.monotonic() + 5)

    assert ways.fitted(start, prices, np.inf) is start
    assert (found >= 0).all() and (found < compact.sizes).all()
    assert compact.total(found) < np.inf


def test_a_tight_problem_is_made_to_fit():
    problem, _ = planted_problem(replace(FAMILIES["tight"], nodes=60, ballast=0.9), seed=1)
    compact, nodes = compacted(reduce_problem(problem, np.inf))
    start = np.zeros(compact.num_nodes, dtype=np.int64)

    found = penalties(compact).fitted(start, np.zeros(len(compact.capacity)), np.inf)

    assert nodes and not compact.fits(start)
    assert compact.fits(found)
