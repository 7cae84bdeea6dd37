"""The bound of a step by its values and their users, beside every assignment of small ones."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.infer import FORBIDDEN_S, ConversionGroup, ConversionRequest
from sbp_planner.joint import group_bound
from sbp_planner.joint.group_bound import BoundTerm, GroupBound
from sbp_planner.joint.layers import TiedStep

seeds = st.integers(0, 10**6)


def step(seed, num_variables=5, num_groups=5):
    """Return a step of a few variables, some of which ask for two targets, or of themselves."""
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 4)) for _ in range(num_variables)]
    groups = []
    for number in range(num_groups):
        source = int(random.integers(num_variables))
        num_targets = int(random.integers(1, 4))
        costs = random.random((sizes[source], num_targets))
        costs[random.random(costs.shape) < 0.3] = 0.0
        costs[random.random(costs.shape) < 0.1] = FORBIDDEN_S
        users = random.choice(num_variables, size=int(random.integers(1, 6)))
        requests = [
            ConversionRequest(int(user), random.integers(num_targets, size=sizes[user]))
            for user in users
        ]
        if random.random() < 0.2:
            requests.append(ConversionRequest(-1, np.array([random.integers(num_targets)])))
        groups.append(
            ConversionGroup(
                value=f"v{number}", source=source, costs=costs, requests=tuple(requests)
            )
        )
    return TiedStep(
        unary=[random.random(size) for size in sizes],
        start=[0] * num_variables,
        groups=groups,
        tied=tuple(range(num_variables)),
    )


def cost(of, values):
    unary = sum(table[value] for table, value in zip(of.unary, values, strict=True))
    return float(unary + sum(group.cost(values) for group in of.groups))


def assignments(of):
    return list(product(*(range(len(table)) for table in of.unary)))


@pytest.mark.slow
@settings(max_examples=60)
@given(seeds, st.sampled_from([1, 2, 6]), st.integers(0, 4))
def test_no_assignment_costs_less_than_the_bound(seed, max_users, num_sweeps):
    of = step(seed)
    least = min(cost(of, values) for values in assignments(of))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_bound, "MAX_USERS", max_users)
        bound = GroupBound(of)
    for _ in range(num_sweeps):
        before = bound.bound
        bound.sweep()

        assert bound.bound >= before - 1e-9
    if least < FORBIDDEN_S:
        assert bound.bound <= least + 1e-9


@settings(max_examples=60)
@given(seeds, st.floats(0, 1))
def test_what_is_struck_out_is_in_no_cheap_assignment_and_the_bound_goes_on(seed, share):
    of = step(seed)
    costs = {values: cost(of, values) for values in assignments(of)}
    above = float(np.quantile(list(costs.values()), share))
    if above >= FORBIDDEN_S:
        return
    bound = GroupBound(of)
    bound.sweep()

    assert bound.strike(above + 1e-9)
    bound.sweep()

    cheap = [values for values, one in costs.items() if one <= above]
    for values in cheap:
        assert all(value in kept for value, kept in zip(values, bound.kept, strict=True))
    assert bound.bound <= min(costs.values()) + 1e-9
    assert not bound.strike(min(costs.values()) - 1e-6) or bound.bound < min(costs.values())


@settings(max_examples=40)
@given(seeds, st.integers(1, 4))
def test_the_least_of_what_is_paid_for_a_value_is_exact(seed, num_users):
    random = np.random.default_rng(seed)
    costs, classes = random.random((3, 3)), np.array([0, 2, 1, 2])
    users = [random.integers(3, size=int(random.integers(1, 4))) for _ in range(num_users)]
    term = BoundTerm(costs, classes, users, tuple(range(num_users + 1)))
    potentials = [random.normal(size=len(of)) for of in (classes, *users)]
    for place, shift in enumerate(potentials):
        term.add(place, shift)

    wanted = [np.full(len(of), np.inf) for of in (classes, *users)]
    for values in product(*(range(len(of)) for of in (classes, *users))):
        asked = {int(of[value]) for of, value in zip(users, values[1:], strict=True)}
        total = sum(costs[classes[values[0]], target] for target in asked)
        total += sum(of[value] for of, value in zip(potentials, values, strict=True))
        for place, value in enumerate(values):
            wanted[place][value] = min(wanted[place][value], total)

    for place, least in enumerate(wanted):
        np.testing.assert_allclose(term.minima(place), least, atol=1e-9)
    assert term.least == pytest.approx(min(map(min, wanted)))


def test_a_chain_of_values_is_bounded_by_what_it_costs():
    random = np.random.default_rng(5)
    costs = [random.random((4, 4)) for _ in range(5)]
    chain = TiedStep(
        unary=[random.random(4) for _ in range(6)],
        start=[0] * 6,
        groups=[
            ConversionGroup(
                value=f"v{at}",
                source=at,
                costs=table,
                requests=(ConversionRequest(at + 1, np.arange(4)),),
            )
            for at, table in enumerate(costs)
        ],
        tied=tuple(range(6)),
    )
    least = min(cost(chain, values) for values in assignments(chain))

    bound = GroupBound(chain).raised(least + 1.0)

    assert bound == pytest.approx(least)


def test_without_time_there_is_a_bound_all_the_same():
    of = step(3)

    bound = GroupBound(of).raised(np.inf, deadline=0.0)

    assert 0 < bound <= min(cost(of, values) for values in assignments(of))
