"""`sbp.batch_norm_sums`: sums of parts give what statistics of the whole are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sbp_torch.ops import arithmetic as _registers  # noqa: F401 - the operator

SUMS = torch.ops.sbp.batch_norm_sums


def moments(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all parts together, [C] each, float64."""
    count = sum(part.numel() // part.shape[1] for part in parts)
    mean, square = sum(SUMS(part) for part in parts) / count
    return mean, square - mean**2


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 2), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_sums_of_elements_and_of_squares(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = x.transpose(0, 1).flatten(1).double()

    made = SUMS(x)

    assert made.dtype == torch.float64
    torch.testing.assert_close(
        made, torch.stack([wide.sum(1), wide.square().sum(1)]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@given(
    cut=st.integers(0, 32), offset=st.sampled_from([0.0, 1.0, 100.0, 1000.0]), last=st.booleans()
)
def test_a_variance_from_parts_is_as_good_as_one_of_the_whole(
    cut: int, offset: float, last: bool
) -> None:
    x = torch.randn(32, 3, 7, 5, generator=torch.Generator().manual_seed(cut)) + offset
    # One part lies elsewhere than the other: most of the variance is between them.
    x[cut:] += 3
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    exact = x.double().var((0, 2, 3), correction=0)
    kernel = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)[1]

    mean, variance = moments(x[:cut], x[cut:])

    torch.testing.assert_close(mean, x.double().mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    allowed = 1e-6 + 2 * float(((kernel - exact) / exact).abs().max()) + 1e-6 * offset
    assert float(((variance - exact) / exact).abs().max()) < allowed


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4)])
def test_no_elements_sum_to_zero(shape: tuple[int, ...]) -> None:
    made = SUMS(torch.empty(shape))

    assert torch.equal(made, torch.zeros(2, shape[1], dtype=torch.float64))
