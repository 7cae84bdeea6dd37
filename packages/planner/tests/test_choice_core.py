"""A core has some strategies of each node; moves in it are moves of the whole problem."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from sbp_planner.choice.compact import compacted
from sbp_planner.choice.iopddl.planted import Shape, planted_problem
from sbp_planner.choice.large.dual import DualAscent
from sbp_planner.choice.large.moves import TreeMoves, near, restricted
from sbp_planner.choice.reduce import reduce_problem


@pytest.fixture(scope="module")
def compact():
    shape = Shape(nodes=120, degree=2.0, reach=10, strategies=26, forbidden=0.1, slack=0.05)
    return compacted(reduce_problem(planted_problem(shape, 1)[0], inf))[0]


@pytest.fixture(scope="module")
def reduced(compact):
    dual = DualAscent(compact)
    for _ in range(20):
        dual.sweep()
    return dual.reduced_costs().nodes


def some_values(compact, seed=0):
    return np.random.default_rng(seed).integers(0, compact.sizes)


def test_the_core_holds_the_present_strategies_and_the_best_of_each_node(
    compact, reduced, monkeypatch
):
    monkeypatch.setattr("sbp_planner.choice.large.moves._MANY_PAIRS", 0)
    values = some_values(compact)

    kept = near(compact, values, reduced, 0.1)

    assert kept[compact.first[:-1] + values].all()
    best = [own.argmin() for own in np.split(reduced, compact.first[1:-1])]
    assert kept[compact.first[:-1] + best].all()
    assert reduced[kept].sum() < reduced.sum() / 2
    assert kept.sum() <= 0.1 * len(kept) + 2 * compact.num_nodes


def test_with_few_pairs_or_all_strategies_there_is_no_core(compact, reduced):
    few = restricted(compact, near(compact, some_values(compact), reduced, 0.02))

    assert near(compact, some_values(compact), reduced, 1.0) is None
    assert near(few, np.zeros(few.num_nodes, dtype=int), few.cost, 0.5) is None


def test_costs_and_bytes_in_a_core_are_those_of_the_whole_problem(compact, reduced):
    values = some_values(compact)
    core = TreeMoves(compact, 1e9, 1.0, kept=near(compact, values, reduced, 0.2))

    inner = core.inner(values)

    assert core.holds(values)
    assert (core.whole(inner) == values).all()
    assert core.part.total(inner) == compact.total(values)
    assert (core.part.excess(inner) == compact.excess(values)).all()
    assert len(core.part.flat.entries) < 0.5 * len(compact.flat.entries)


def test_moves_in_a_core_make_assignments_fit_and_better(compact, reduced):
    values = some_values(compact)
    core = TreeMoves(compact, 1e9, 1.0, kept=near(compact, values, reduced, 0.3))
    prices = np.zeros(len(compact.capacity))

    fitted = core.fitted(values, prices, inf)
    better = fitted
    for _ in range(30):
        better = core.improve(better, prices)
    core.oscillated(better, prices, inf)
    core.drawn(better, prices, 1.0)

    assert not compact.fits(values)
    assert compact.fits(better)
    assert compact.total(better) < compact.total(values)
    assert core.holds(better)


def test_an_assignment_with_other_strategies_is_not_in_the_core(compact, reduced):
    kept = near(compact, some_values(compact), reduced, 0.1)
    out = int(np.flatnonzero(~kept)[0])
    node = int(np.searchsorted(compact.first, out, side="right")) - 1
    values = some_values(compact)
    values[node] = out - compact.first[node]

    assert not TreeMoves(compact, 1e9, 1.0, kept=kept).holds(values)
