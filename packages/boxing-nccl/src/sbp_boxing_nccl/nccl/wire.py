"""What NCCL is given in place of a dtype that it does not reduce.

Moves go as bytes; reductions go in a dtype that NCCL reduces, with the same result.
"""

from __future__ import annotations

import torch

#: The dtypes of torch that NCCL knows, by the names that `device.NcclChannel` is given.
NATIVE: dict[torch.dtype, str] = {
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

#: dtype -> (dtype that is reduced instead, reductions that change their name).
_STAND_INS: dict[torch.dtype, tuple[torch.dtype, dict[str, str]]] = {
    torch.bool: (torch.uint8, {"sum": "max"}),  # torch adds truth values as `or`
    torch.int16: (torch.int32, {}),
}


def reducible(values: torch.Tensor, reduction: str) -> tuple[torch.Tensor, str]:
    """Return values that NCCL can reduce, and the reduction, with the result that is asked for.

    Args:
        values: Shape (elements,), contiguous, any dtype; complex ones for `sum` only.
        reduction: `sum`, `max` or `min`.

    Returns:
        The values themselves or a view of them where that is enough; else a copy.
    """
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1), reduction
    dtype, renamed = _STAND_INS.get(values.dtype, (values.dtype, {}))
    return values.to(dtype), renamed.get(reduction, reduction)


def restored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what `reducible` made, reduced, in the dtype it was made of; shape (elements,)."""
    if dtype.is_complex:
        return torch.view_as_complex(values.reshape(-1, 2))
    return values.to(dtype)
