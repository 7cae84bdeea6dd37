from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import compositions

from sbp_core.errors import SbpValueError
from sbp_planner.stages.table import (
    InFlightLimits,
    TableProblem,
    TableStage,
    cut_table,
    price_table,
)


def upper(values):
    """Return values above the diagonal, infinite elsewhere."""
    return np.where(np.triu(np.ones(values.shape), 1) > 0, values, np.inf)


@st.composite
def problems(draw):
    """Random prices, which depend on everything that they may depend on."""
    size, devices = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    # Few different numbers, so that there are ties.
    seconds = random.integers(1, draw(st.sampled_from([4, 100])), (5, 5, size, size))
    transfers = random.integers(0, 20, (5, 5, 5, size)) * draw(st.integers(0, 1))
    sizes = random.integers(1, 6, (5, size, size))
    micro_batches = draw(st.none() | st.integers(1, 6))
    policies = [
        p for p in InFlightLimits if micro_batches is not None or p is not InFlightLimits.ALL
    ]
    return TableProblem(
        num_places=size,
        devices=devices,
        seconds=lambda own, behind: upper(seconds[own, behind]),
        device_counts=draw(st.sampled_from([None, (1, 2, 4), (1,)])),
        transfer_s=lambda own, after, behind: transfers[own, after, behind].astype(float),
        memory=draw(st.sampled_from([None, lambda own, in_flight: upper(sizes[own] * in_flight)])),
        memory_bytes=draw(st.integers(3, 15)),
        in_flight=draw(st.sampled_from(policies)),
        micro_batches=micro_batches,
        num_stages=draw(st.none() | st.integers(1, 4)),
    )


def all_pipelines(problem):
    inner = range(1, problem.num_places - 1)
    for count in range(1, problem.devices + 1):
        for cuts in combinations(inner, count - 1):
            ends = (0, *cuts, problem.num_places - 1)
            for devices in compositions(problem.devices, count):
                yield [
                    TableStage(start=i, stop=j, devices=own)
                    for i, j, own in zip(ends, ends[1:], devices, strict=False)
                ]


def best_of_all(problem):
    best = inf
    for stages in all_pipelines(problem):
        counts = problem.device_counts
        if counts is None or all(stage.devices in counts for stage in stages):
            try:
                best = min(best, price_table(problem, stages).objective_s)
            except SbpValueError:
                continue
    return best


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems())
def test_no_pipeline_is_better(problem):
    expected = best_of_all(problem)

    plan = cut_table(problem)

    if expected == inf:
        assert plan is None
    else:
        assert plan.objective_s == pytest.approx(expected)
        assert price_table(problem, plan.stages) == plan


def layers(seconds, devices, **changes):
    """Layers in a row, whose stages take their sum, divided by devices."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(ends)
    return TableProblem(
        num_places=size,
        devices=devices,
        seconds=lambda own, behind: upper(ends[None, :] - ends[:, None]) / own,
        **changes,
    )


def test_a_flushed_pipeline_trades_its_slowest_stage_for_a_shorter_way_through():
    # Steady, 2 + 2 is as fast as 4 devices on everything; a transfer makes the way longer.
    changes = {"transfer_s": lambda own, after, behind: np.ones(3)}

    short = cut_table(layers([4.0, 4.0], 2, micro_batches=1, **changes))
    steady = cut_table(layers([4.0, 4.0], 2, device_counts=(1,), **changes))

    assert [stage.devices for stage in short.stages] == [2]
    assert short.objective_s == 4.0
    assert (steady.slowest_s, steady.sum_s) == (4.0, 9.0)


def test_with_many_micro_batches_the_slowest_stage_decides():
    def seconds(own, behind):
        table = np.full((3, 3), np.inf)
        if own == 2:
            table[0, 2] = 6.0
        if own == 1:
            table[0, 1], table[1, 2] = 5.0, 5.0
        return table

    few, many = (
        cut_table(TableProblem(num_places=3, devices=2, seconds=seconds, micro_batches=m))
        for m in (4, 6)
    )

    # One stage takes 6 m, two take 5 (m - 1) + 10.
    assert (len(few.stages), few.objective_s) == (1, 24.0)
    assert (len(many.stages), many.objective_s) == (2, 35.0)


@pytest.mark.parametrize("policy", list(InFlightLimits))
def test_what_is_in_flight_depends_on_the_schedule(policy):
    problem = layers([1.0] * 4, 4, micro_batches=8, in_flight=policy)

    held = {policy: [problem.held(2, 3, stages) for stages in (1, 3)]}[policy]

    assert (
        held
        == {
            InFlightLimits.ROUND_ROBIN: [3, 3],  # ceil((2 + 3) / 2)
            InFlightLimits.STAGES: [1, 3],
            InFlightLimits.ALL: [8, 8],
        }[policy]
    )


def test_equal_layers_are_cut_evenly_into_a_fixed_number_of_stages():
    plan = cut_table(layers([1.0] * 12, 4, num_stages=4))

    assert [stage.stop - stage.start for stage in plan.stages] == [3, 3, 3, 3]


def test_more_stages_than_places_or_devices_are_impossible():
    assert cut_table(layers([1.0] * 2, 4, num_stages=3)) is None
    assert cut_table(layers([1.0] * 4, 2, num_stages=3)) is None


@pytest.mark.parametrize(
    "changes",
    [{"devices": 0}, {"num_places": 1}, {"micro_batches": 0}, {"in_flight": InFlightLimits.ALL}],
)
def test_problems_that_cannot_be_are_refused(changes):
    own = {"num_places": 3, "devices": 2, "seconds": lambda own, behind: np.zeros((3, 3))}

    with pytest.raises(SbpValueError):
        TableProblem(**{**own, **changes})


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([(0, 2, 2), (2, 3, 2)], "last"),
        ([(0, 2, 2), (1, 4, 2)], "one by one"),
        ([(0, 4, 3)], "devices"),
        ([(0, 0, 2), (0, 4, 2)], "is impossible"),
    ],
)
def test_stages_that_are_no_pipeline_are_refused(stages, said):
    problem = layers([1.0] * 4, 4)

    with pytest.raises(SbpValueError, match=said):
        price_table(problem, [TableStage(start=i, stop=j, devices=own) for i, j, own in stages])


@pytest.mark.exhaustive
@settings(max_examples=5000, deadline=None)
@given(problems())
def test_no_pipeline_is_better_on_more_problems(problem):
    test_no_pipeline_is_better.hypothesis.inner_test(problem)


def test_sixty_four_layers_on_sixty_four_devices_are_cut_quickly():
    random = np.random.default_rng(0)
    problem = layers(
        random.random(64), 64, device_counts=(1, 2, 4, 8, 16, 32, 64), micro_batches=32
    )

    plan = cut_table(problem)

    waves = problem.micro_batches - 1
    assert plan.objective_s == pytest.approx(waves * plan.slowest_s + plan.sum_s)
