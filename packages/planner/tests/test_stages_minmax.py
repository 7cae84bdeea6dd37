import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_planner.stages.hierarchy import minmax_product


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 150), st.integers(0, 10_000), st.floats(0, 1))
def test_the_product_is_the_least_of_the_larger_ones(size, seed, density):
    random = np.random.default_rng(seed)
    left, right = (
        np.where(
            np.triu(random.random((size, size)) < density, 1),
            random.integers(0, 50, (size, size)).astype(float),
            np.inf,
        )
        for _ in range(2)
    )
    expected = np.maximum(left[:, :, None], right[None, :, :]).min(axis=1)

    assert np.array_equal(minmax_product(left, right), expected)
