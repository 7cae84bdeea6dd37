"""Messages in steps: senders before receivers, and bounds that hold in any order of the nodes."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from sbp_planner.choice.compact import compacted
from sbp_planner.choice.iopddl.synthetic import transformer_problem
from sbp_planner.choice.large import dual as module
from sbp_planner.choice.large.dual import DualAscent
from sbp_planner.choice.program import solve_program
from sbp_planner.choice.reduce import reduce_problem


def some_compact():
    return compacted(reduce_problem(transformer_problem(6, seed=3, slack=0.05), -inf))[0]


@pytest.mark.parametrize("few", [2, 1000])
def test_every_edge_has_one_step_each_way_and_senders_come_first(monkeypatch, few):
    monkeypatch.setattr(module, "_FEW_LEVELS", few)
    monkeypatch.setattr(module, "_ARC_S", 0.0)
    compact = some_compact()

    plan = module.schedule(compact)

    for steps in (plan.ahead, plan.back):
        edges = np.concatenate([step.edges for step in steps])
        assert sorted(edges.tolist()) == list(range(len(compact.edges)))
        heard: set[int] = set()
        for step in steps:
            # What a step tells a node, no earlier step may have needed.
            heard |= set(step.messages.from_column.tolist())
            assert not heard & set(step.messages.to_column.tolist())
    assert sorted(node for level in plan.levels for node in level.nodes) == list(
        range(compact.num_nodes)
    )


def test_few_levels_are_made_where_numbers_give_many(monkeypatch):
    many = len(module.schedule(some_compact()).levels)
    monkeypatch.setattr(module, "_FEW_LEVELS", 6)
    monkeypatch.setattr(module, "_ARC_S", 0.0)

    few = len(module.schedule(some_compact()).levels)

    assert few < many / 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("few", [6, 1000])
def test_bounds_come_near_the_best_in_any_order(monkeypatch, few):
    monkeypatch.setattr(module, "_FEW_LEVELS", few)
    monkeypatch.setattr(module, "_ARC_S", 0.0)
    compact = some_compact()
    best = compact.total(solve_program(compact, inf).values)
    dual = DualAscent(compact)

    for _ in range(150):
        dual.sweep()
        dual.move_prices(best)

    assert 0.97 * best < dual.bound <= best * (1 + 1e-9)
