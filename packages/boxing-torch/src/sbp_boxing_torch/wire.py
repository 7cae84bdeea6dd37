"""What a transport is given in place of a dtype that it does not know.

Moves go as bytes; reductions go in a dtype that gloo and NCCL can reduce, with the same result.
"""

from __future__ import annotations

import torch

#: dtype -> (dtype that is reduced instead, reductions that change their name).
_STAND_INS: dict[torch.dtype, tuple[torch.dtype, dict[str, str]]] = {
    torch.bool: (torch.uint8, {"sum": "max"}),  # torch adds truth values as `or`
    torch.int16: (torch.int32, {}),
}


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return contiguous values of shape (elements,) as uint8 of shape (bytes,), without a copy."""
    return values.view(torch.uint8)


def reducible(dtype: torch.dtype) -> bool:
    """Say whether the transports reduce a dtype as it is."""
    return dtype not in _STAND_INS and not dtype.is_complex


def to_reducible(values: torch.Tensor, reduction: str) -> tuple[torch.Tensor, str]:
    """Return a fresh tensor, and a reduction, that a transport can do instead.

    Args:
        values: Shape (elements,), any dtype; complex ones for `sum` only.
        reduction: `sum`, `max` or `min`.
    """
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1).clone(), reduction
    dtype, renamed = _STAND_INS.get(values.dtype, (values.dtype, {}))
    return values.to(dtype, copy=True), renamed.get(reduction, reduction)


def from_reducible(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what `to_reducible` made, reduced, in the dtype it was made of."""
    if dtype.is_complex:
        return torch.view_as_complex(values.reshape(-1, 2))
    return values.to(dtype)
