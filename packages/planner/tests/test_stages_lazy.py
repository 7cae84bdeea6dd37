"""Cutting with prices that are asked for one by one."""

from itertools import count
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.stages import (
    InFlightLimits,
    PricedStage,
    TableProblem,
    TableStage,
    cut_lazily,
    cut_table,
)


class Drawn:
    """Stages with random prices, and prices that are too low."""

    def __init__(self, seed, *, places=5, devices=4, limited=True):
        random = np.random.default_rng(seed)
        self.below = np.triu(np.ones((places, places)), 1) > 0
        self.asked = []
        self.free, self.least, self.held = {}, {}, {}
        for own in range(1, devices + 1):
            for behind in range(devices - own + 1):
                free = random.uniform(1, 10, (places, places))
                self.free[own, behind] = np.where(self.below, free, inf)
                share = random.uniform(0.1, 1, (places, places))
                self.least[own, behind] = np.where(self.below, free * share, inf)
                for flying in range(1, devices + 1):
                    more = random.choice([1.0, 1.5, inf], (places, places)) if limited else 1.0
                    self.held[own, behind, flying] = np.where(self.below, free * more, inf)
        self.exact = TableProblem(
            num_places=places,
            devices=devices,
            seconds=lambda own, behind: self.free[own, behind],
            held_seconds=lambda *key: self.held[key],
            in_flight=InFlightLimits.STAGES,
            micro_batches=int(random.integers(1, 6)),
        )
        self.low = TableProblem(
            num_places=places,
            devices=devices,
            seconds=lambda own, behind: self.least[own, behind],
            in_flight=InFlightLimits.STAGES,
            micro_batches=self.exact.micro_batches,
        )

    def price(self, stage, behind, in_flight):
        self.asked.append((stage, behind, in_flight))
        place = stage.start, stage.stop
        return PricedStage(
            free_s=self.free[stage.devices, behind][place],
            held_s=self.held[stage.devices, behind, in_flight][place],
        )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_the_best_is_that_of_all_prices(seed, limited):
    drawn = Drawn(seed, limited=limited)
    best = cut_table(drawn.exact)

    found = cut_lazily(drawn.low, drawn.price)

    if best is None:
        assert found is None
    else:
        assert found.plan.objective_s == pytest.approx(best.objective_s)
        assert found.bound_s == pytest.approx(best.objective_s)
    assert len(drawn.asked) == len(set(drawn.asked)), "a stage was priced twice"


def test_stages_that_cannot_be_in_the_best_are_not_priced():
    drawn = Drawn(0, limited=False)
    for key, table in drawn.free.items():
        drawn.least[key] = 0.99 * table

    cut_lazily(drawn.low, drawn.price)

    every = sum(int(drawn.below.sum()) for _ in drawn.free)
    assert 0 < len(drawn.asked) < every / 4


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_where_time_is_up_the_best_so_far_comes_with_a_bound(seed, patience):
    drawn = Drawn(seed, limited=False)
    best, ticks = cut_table(drawn.exact), count()

    found = cut_lazily(drawn.low, drawn.price, is_out_of_time=lambda: next(ticks) >= patience)

    assert found is None or found.bound_s <= best.objective_s * (1 + 1e-9)
    assert found is None or found.plan.objective_s >= best.objective_s * (1 - 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 0.3]))
def test_a_gap_ends_the_search_earlier_and_is_kept(seed, gap):
    exact, early = Drawn(seed, limited=False), Drawn(seed, limited=False)
    best = cut_lazily(exact.low, exact.price).plan.objective_s

    found = cut_lazily(early.low, early.price, gap=gap)

    assert found.bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.plan.objective_s
    assert found.bound_s >= found.plan.objective_s * (1 - gap) * (1 - 1e-9)
    assert len(early.asked) <= len(exact.asked)


def test_pipelines_that_are_priced_first_are_never_better_than_what_is_found():
    drawn = Drawn(3, limited=False)
    first = [TableStage(start=0, stop=4, devices=4)]

    found = cut_lazily(drawn.low, drawn.price, first=[first])

    assert drawn.asked[0][0] == first[0]
    late = cut_lazily(drawn.low, drawn.price, first=[first], is_out_of_time=lambda: True)
    assert 0 < late.bound_s <= found.plan.objective_s <= late.plan.objective_s
    micro_batches = drawn.exact.micro_batches
    assert found.plan.objective_s <= micro_batches * drawn.free[4, 0][0, 4]
