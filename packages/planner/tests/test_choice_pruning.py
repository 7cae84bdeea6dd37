"""What reduced costs leave of a problem has all assignments that cost no more than some c."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from sbp_planner.choice.compact import compacted
from sbp_planner.choice.iopddl.planted import Shape, planted_problem
from sbp_planner.choice.large.dual import DualAscent
from sbp_planner.choice.reduce import reduce_problem


@pytest.fixture(scope="module")
def compact():
    shape = Shape(nodes=7, degree=2.5, reach=6, strategies=4, forbidden=0.1, single=0.0)
    return compacted(reduce_problem(planted_problem(shape, 3)[0], -inf))[0]


@pytest.fixture(scope="module")
def guide(compact):
    dual = DualAscent(compact)
    for _ in range(20):
        dual.sweep()
        dual.move_prices(inf)
    dual.price = dual.prices
    dual.sweep()
    return dual.reduced_costs()


def test_fewer_pairs_are_for_a_lower_cost(guide):
    every = int((guide.pairs < inf).sum())

    below, room, count = guide.room_for(inf, every // 3)

    assert count <= every // 3 + 2
    assert below == pytest.approx(guide.bound + room)
    assert guide.room_for(below, every)[0] == below


def test_all_assignments_below_the_cost_are_left(compact, guide):
    every = [np.array(chosen) for chosen in product(*(range(int(size)) for size in compact.sizes))]
    fitting = [values for values in every if compact.fits(values)]
    cost = sorted(map(compact.total, fitting))[20]
    below, room, _ = guide.room_for(cost, int((guide.pairs < inf).sum()))
    present = np.zeros(compact.num_nodes, dtype=np.int64)

    nodes, pairs = guide.left(compact, room, present)

    assert below == cost
    for values in fitting:
        if compact.total(values) <= below:
            assert all(own[s] for own, s in zip(nodes, values, strict=True))
            assert all(
                own[values[u], values[v]] for own, (u, v) in zip(pairs, compact.edges, strict=True)
            )
    assert not all(own.all() for own in pairs)
    assert all(own[s] for own, s in zip(nodes, present, strict=True))
