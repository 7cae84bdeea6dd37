"""Equal layers that are posed once: they mean and cost what they do posed one by one."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_requests import request

from sbp_core.infer import joint_problem
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster, mlp
from sbp_planner import ilp
from sbp_planner.choice import evaluate
from sbp_planner.joint.layers import repeated, tie
from sbp_planner.joint.lifetime import held
from sbp_planner.joint.lower import lower_step
from sbp_planner.joint.near import least_s, limited
from sbp_planner.joint.priced import PricedMemory
from sbp_planner.search_configs import IlpConfig

PINS = st.sampled_from(
    [
        {},
        {"layers.*.weight": "S(0)"},
        {"layers.1.weight": "S(1)"},
        {"batch": {"data": "S(0)"}, "layers.2.weight": "B"},
        {"use:layers.0.weight": "B"},
    ]
)


def deep(num_layers=5, width=16, shape=(2,), axes=("data",), pins=None):
    return PlanRequest(
        graph=mlp((width,) * (num_layers + 1), batch=8),
        mesh=Placement.grid(shape, axes),
        cluster=cluster(num_devices=8) if "pipe" in axes else cluster(),
        pins=pins or {},
    )


def both(asked):
    """Return a step posed once for equal layers, and posed layer by layer."""
    return (joint_problem(asked, from_axes=False, tied=tied) for tied in (True, False))


def untied_values(once, each, values):
    """Return the values layer by layer of values of the step that was posed once."""
    found = [0] * len(each.unary)
    for name, variable in each.node_variable.items():
        found[variable] = values[once.node_variable[name]]
    for name, variable in each.storage_variable.items():
        found[variable] = values[once.storage_variable[name]]
    return tuple(found)


def check_means_the_same(asked, seed):
    once, each = both(asked)
    random = Random(seed)

    for _ in range(5):
        values = [random.randrange(size) for size in once.sizes]
        alone = untied_values(once, each, values)
        assert once.decided(values) == each.decided(alone)
        assert once.cost(values) == pytest.approx(each.cost(alone), rel=1e-9)
    return once, each


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.integers(1, 6),
    st.sampled_from([((2,), ("data",)), ((2, 2), ("data", "tensor")), ((2, 2), ("pipe", "data"))]),
    PINS,
    st.integers(0, 10**6),
)
def test_layers_that_are_posed_once_mean_and_cost_what_they_do_one_by_one(layers, on, pins, seed):
    named = {key: pin for key, pin in pins.items() if layers > 2 or "layers" not in key}

    once, each = check_means_the_same(deep(max(layers, 2), 16, *on, pins=named), seed)

    # What is posed layer by layer is tied to as many variables.
    assert len(once.unary) == len(tie(each).unary)


def test_a_captured_step_is_posed_once_too():
    check_means_the_same(request((2,), ("data",)), 1)


def test_what_is_posed_grows_with_different_layers_not_with_layers():
    few, many = (joint_problem(deep(n), from_axes=False, tied=True) for n in (4, 16))

    assert len(few.unary) == len(many.unary)
    assert len(few.groups) == len(many.groups)
    assert many.sizes == few.sizes
    assert many.cost([0] * len(many.unary)) > 3 * few.cost([0] * len(few.unary))


def test_a_layer_that_is_pinned_otherwise_is_decided_by_itself():
    once = joint_problem(deep(pins={"layers.1.weight": "S(1)"}), from_axes=False, tied=True)

    variables = [once.storage_variable[f"layers.{at}.weight"] for at in range(5)]
    assert len(set(variables)) == 2
    assert variables[1] not in (variables[0], variables[2])


def test_tying_leaves_little_of_what_was_posed_once():
    once, each = both(deep())

    assert repeated(each)
    assert not repeated(once)


def test_each_layer_holds_what_it_holds_in_its_own_time():
    once, each = both(deep())
    random = Random(2)

    for _ in range(5):
        values = [random.randrange(size) for size in once.sizes]
        alone = untied_values(once, each, values)
        counted = held(once, 1e12).by_place(values)
        assert counted.tolist() == held(each, 1e12).by_place(alone).tolist()


def test_a_program_with_memory_counts_every_layer():
    once, each = both(deep())
    within = held(once, 1e12)
    lowered = lower_step(once, ties=repeated(once), held=within)
    random = Random(3)

    for _ in range(5):
        values = tuple(random.randrange(size) for size in once.sizes)
        found = evaluate(lowered.choice, lowered.assignment(values))
        alone = untied_values(once, each, values)
        assert lowered.values(lowered.assignment(values)) == values
        assert found.peak_usage == held(each, 1e12).peak_bytes(alone)
        if np.isfinite(found.cost):
            assert found.cost == pytest.approx(each.cost(alone), rel=1e-9)


def test_a_price_on_memory_is_paid_by_every_layer():
    once, each = both(deep())
    values = tuple(once.start)
    limit = 0.5 * held(once, 1e12).peak_bytes(values)
    priced = [
        PricedMemory(
            problem, tie(problem), held(problem, limit), tuple(problem.start), max_entries=1 << 14
        ).found[0]
        for problem in (once, each)
    ]

    assert priced[0].priced_bytes == pytest.approx(priced[1].priced_bytes) != 0
    assert priced[0].peak_bytes == priced[1].peak_bytes


@pytest.mark.slow
def test_the_bound_of_all_signatures_is_that_of_layers_posed_one_by_one():
    bounds = []
    for problem in both(deep(4, shape=(2, 2, 2), axes=("data", "context", "tensor"))):
        assert limited(problem, max_prices=0)
        cost_s = 2 * problem.cost(problem.start)
        bounds.append(least_s(problem, cost_s, tied=True, time_limit_s=60.0))

    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)


def test_plans_of_equal_layers_fit_memory_as_before():
    asked = deep(6, width=32)
    free = ilp.IlpPlanner(IlpConfig()).plan(asked)
    alone = ilp.IlpPlanner(IlpConfig(tied=False)).plan(asked)

    assert free.report["cost_s"] >= alone.report["cost_s"] * (1 - 1e-9)
    assert free.report["bound_s"] <= free.report["cost_s"]
    assert free.report["gap"] < 1e-3
