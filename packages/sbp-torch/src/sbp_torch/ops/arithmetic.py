"""Register operators for constants, wide matrix products and batch-norm sums with PyTorch.

    sbp.constant(values, size, *, dtype, device)    the numbers, row by row, as a tensor
    sbp.mm_as(a, b, dtype), sbp.bmm_as              a b, summed and returned in `dtype`
    sbp.batch_norm_sums(x)    [B, C, ...] -> [2, C], float64: sums of x and of x^2 by channel

Capture and the graph passes of `sbp_aten` use them. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sbp_torch.ops import register

#: For these dtypes, kernels of batch normalisation can keep running statistics in float32.
_LOW = (torch.bfloat16, torch.float16)


def _constant(
    values: Sequence[float | int | bool],
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return numbers, row by row, as a tensor of a shape; on the CPU if `device` is None."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(tuple(size))


def _constant_shape(
    values: object, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype, device=device or "cpu")


def _product_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two matrices, or of two batches of matrices, in a dtype.

    On CUDA, whose kernels support it, nothing is rounded to the dtype of the factors. On other
    devices the product is first rounded to that dtype, as an ordinary product is.

    Args:
        a: [i, k] or [n, i, k].
        b: [k, j] or [n, k, j].
        dtype: The dtype of the sums and of the result.
    """
    product: Callable[..., Tensor] = torch.mm if a.dim() == 2 else torch.bmm
    if a.is_cuda and a.dtype != dtype:
        return product(a, b, out_dtype=dtype)
    return product(a, b).to(dtype)


def _product_shape(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _batch_norm_sums(x: Tensor) -> Tensor:
    """Return the sums of elements and of their squares of each channel, [2, C], float64.

    The kernel of batch normalisation computes mean and variance of its input, each with its own
    rounding. The sums are computed from these. Float64 sums lose no precision of float32 data: the
    variance from sums of parts is as precise as from the parts' means and squared deviations
    (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983). For float64
    data, sums of squares have a relative error of 1e-16 (mean / deviation)^2.

    Args:
        x: [B, C, ...], floating; may have no elements.
    """
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    if not count:
        return x.new_zeros((2, channels), dtype=torch.float64)
    # Statistics have the dtype of the running statistics, if these are given.
    running = x.new_zeros(channels, dtype=torch.float32) if x.dtype in _LOW else None
    found = torch.ops.aten.batch_norm_update_stats(x, running, running, 0.0)
    mean, variance = (value.double() for value in found)
    return torch.stack([mean, torch.addcmul(variance, mean, mean)]).mul_(count)


def _sums_shape(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float64)


register(
    "constant(Scalar[] values, SymInt[] size, *, ScalarType dtype, Device? device=None) -> Tensor",
    _constant,
    _constant_shape,
)
for _name in ("mm_as", "bmm_as"):
    _schema = f"{_name}(Tensor a, Tensor b, ScalarType dtype) -> Tensor"
    register(_schema, _product_as, _product_shape)
register("batch_norm_sums(Tensor x) -> Tensor", _batch_norm_sums, _sums_shape)
