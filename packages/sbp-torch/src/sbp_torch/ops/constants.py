"""Our operator for constants that a program writes out, `sbp.constant`, for PyTorch.

    sbp.constant(values, size, *, dtype, device)    the numbers, row by row, as a tensor

Importing this module registers it with PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(
    values: Sequence[float | int | bool],
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return the numbers as a tensor.

    Args:
        values: Row by row.
        size: Shape; as many elements.
        dtype: Any.
        device: None: the CPU.
    """
    return torch.tensor(values, dtype=dtype, device=device).reshape(tuple(size))


_SCHEMA = "(Scalar[] values, SymInt[] size, *, ScalarType dtype, Device? device=None) -> Tensor"
_REGISTERED = torch.library.custom_op("sbp::constant", constant, mutates_args=(), schema=_SCHEMA)


@_REGISTERED.register_fake
def _shape_only(
    values: Sequence[float | int | bool],
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype, device=device or "cpu")
