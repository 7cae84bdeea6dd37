from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_core.infer.minsum import Factor, minimise, total_cost


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    factors = []
    for _ in range(draw(st.integers(0, 8))):
        count = draw(st.integers(1, min(3, len(sizes))))
        variables = tuple(draw(st.permutations(range(len(sizes))))[:count])
        shape = [sizes[v] for v in variables]
        cells = draw(st.lists(st.integers(0, 4), min_size=27, max_size=27))
        table = np.array(cells, dtype=np.float64)[: int(np.prod(shape))].reshape(shape)
        factors.append(Factor(variables, table))
    return sizes, factors


def least(sizes, factors):
    return min(total_cost(factors, values) for values in product(*map(range, sizes)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_elimination_finds_the_least_of_all_assignments(problem):
    sizes, factors = problem

    found = minimise(sizes, factors, [0] * len(sizes))

    assert found.exact
    assert found.cost == least(sizes, factors) == total_cost(factors, found.values)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_holding_variables_never_ends_above_the_start(problem):
    sizes, factors = problem
    start = [size - 1 for size in sizes]

    found = minimise(sizes, factors, start, max_entries=2)

    assert least(sizes, factors) <= found.cost <= total_cost(factors, start)
    assert found.cost == total_cost(factors, found.values)


def test_a_long_chain_flips_as_a_whole():
    agree = np.array([[0.0, 1.0], [1.0, 0.0]])
    factors = [Factor((i, i + 1), agree) for i in range(499)]
    prefer_one = Factor((499,), np.array([0.5, 0.0]))

    found = minimise([2] * 500, [*factors, prefer_one], [0] * 500)

    assert found.values == (1,) * 500


def test_variables_without_choice_do_not_widen_tables():
    star = [Factor((0, i), np.zeros((2, 1))) for i in range(1, 100)]

    found = minimise([2] + [1] * 99, [*star, Factor((0,), np.array([3.0, 1.0]))], [0] * 100)

    assert found.exact
    assert found.values[0] == 1


def test_a_table_that_does_not_fit_its_variables_is_refused():
    with pytest.raises(SbpValueError, match="over the variables"):
        Factor((0, 0), np.zeros((2, 2)))
