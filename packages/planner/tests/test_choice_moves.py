"""Trees are changed to their best, never to what costs or exceeds more."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
from choice_problems import brute_force, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.choice import ChoiceProblem
from sbp_planner.choice.compact import compacted
from sbp_planner.choice.large.forest import Forests
from sbp_planner.choice.large.moves import TreeMoves
from sbp_planner.choice.large.neighbourhood import Neighbourhoods
from sbp_planner.choice.reduce import reduce_problem
from sbp_planner.choice.reduced_graph import NothingAllowedError


def left(problem):
    """Return what is left without reductions, None if nothing is."""
    try:
        compact, nodes = compacted(reduce_problem(problem, -inf))
    except NothingAllowedError:
        return None
    return compact if nodes else None


def path(count: int, **more) -> ChoiceProblem:
    random = np.random.default_rng(3)
    return ChoiceProblem(
        costs=[random.integers(0, 9, 3).astype(float) for _ in range(count)],
        edges=list(pairwise(range(count))),
        edge_costs=[random.integers(0, 9, (3, 3)).astype(float) for _ in range(count - 1)],
        **more,
    )


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=7), st.integers(0, 9), st.floats(0, 2))
def test_no_row_exceeds_more_and_what_fits_costs_no_more(problem, seed, price):
    compact = left(problem)
    if compact is None:
        return
    random = np.random.default_rng(seed)
    values = random.integers(0, compact.sizes)
    prices = np.full(len(compact.capacity), price)
    trees = TreeMoves(compact, 1000.0, seed=seed)

    for way in (trees.improve, lambda *start: trees.drawn(*start, temperature=3.0)):
        better = way(values, prices)

        assert (better >= 0).all() and (better < compact.sizes).all()
        before, after = compact.excess(values), compact.excess(better)
        assert (after <= np.maximum(before, 0)).all()
        if way == trees.improve and compact.fits(values):
            near = Neighbourhoods(compact, values)
            merit = near.merit
            near.replace_values(better)
            assert near.merit < merit or near.values is values or (near.values == better).all()
            assert compact.total(better) <= compact.total(values) or compact.total(values) == inf


def test_a_tree_without_memory_is_at_its_best_at_once():
    problem = path(7)
    compact = left(problem)

    found = TreeMoves(compact, 1000.0).improve(np.zeros(7, dtype=np.int64), np.zeros(0))

    assert compact.total(found) == brute_force(problem)


def test_two_trees_exchange_memory_if_that_pays():
    # Either may hold the 8 bytes; the second has more of it, the first has them.
    problem = ChoiceProblem(
        costs=[np.array([0.0, 3.0]), np.array([0.0, 9.0])], usages=[[8, 0], [8, 0]], usage_limit=8
    )
    compact = left(problem)
    trees = TreeMoves(compact, 1000.0)

    found = trees.improve(np.array([0, 1]), np.array([0.5]))

    assert found.tolist() == [1, 0]


def test_drawn_trees_vary_with_the_temperature():
    compact = left(path(30))
    start = np.zeros(30, dtype=np.int64)

    cold = {
        tuple(TreeMoves(compact, 1e3, seed=s).drawn(start, np.zeros(0), 1e-9)) for s in range(5)
    }
    hot = [
        compact.total(TreeMoves(compact, 1e3, seed=s).drawn(start, np.zeros(0), 50))
        for s in range(5)
    ]

    assert len(cold) == 1
    assert min(hot) > compact.total(np.array(next(iter(cold))))


def test_trees_are_trees_of_free_nodes():
    random = np.random.default_rng(0)
    pairs = sorted({(int(min(e)), int(max(e))) for e in random.integers(0, 60, (150, 2))})
    pairs = [(u, v) for u, v in pairs if u != v]
    compact = left(
        ChoiceProblem(costs=[np.arange(2.0)] * 60, edges=pairs, edge_costs=[np.eye(2)] * len(pairs))
    )

    forest = Forests(compact, 1e3).next()

    inner = [(u, v) for u, v in compact.edges if forest.tree[u] >= 0 and forest.tree[v] >= 0]
    assert all(forest.tree[u] == forest.tree[v] for u, v in inner)
    for tree in set(forest.tree.tolist()) - {-1}:
        nodes = (forest.tree == tree).sum()
        assert sum(forest.tree[u] == tree for u, _ in inner) == nodes - 1
    assert sum(len(depth.nodes) for depth in forest.depths) == (forest.tree >= 0).sum() > 20
