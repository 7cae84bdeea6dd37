"""Our products of factors of low precision in a wider dtype: `sbp.mm_as`, `sbp.bmm_as`.

    sbp.mm_as(a, b, dtype)     a b, summed and given in `dtype`

On devices whose PyTorch can (CUDA), nothing is rounded to the dtype of the factors; elsewhere the
product is rounded to it first, as a product of its own would be.

Importing this module registers the operators with PyTorch, which is the only way to have them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def mm_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of two matrices, [i, k] and [k, j], in a dtype."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def bmm_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of two batches of matrices, [n, i, k] and [n, k, j], in a dtype."""
    if a.is_cuda and a.dtype != dtype:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a, b).to(dtype)


def _shape_only(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _register(name: str, function: Callable[..., Tensor]) -> None:
    schema = "(Tensor a, Tensor b, ScalarType dtype) -> Tensor"
    made = torch.library.custom_op(f"sbp::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(_shape_only)


_register("mm_as", mm_as)
_register("bmm_as", bmm_as)
