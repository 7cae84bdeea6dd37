"""What MPI is given in place of a dtype that it does not know.

Moves go as integers of the same width; reductions go in a dtype that MPI can reduce.
"""

from __future__ import annotations

from typing import Any

import torch

#: Width in bytes -> (dtype to view values as, MPI datatype) for moves.
_BY_WIDTH = {
    1: (torch.uint8, "UINT8_T"),
    2: (torch.int16, "INT16_T"),
    4: (torch.int32, "INT32_T"),
    8: (torch.int64, "INT64_T"),
    16: (torch.complex128, "C_DOUBLE_COMPLEX"),
}

#: dtype -> MPI datatype for reductions.
_REDUCIBLE = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}

#: dtype -> dtype that is reduced instead.
_STAND_INS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def movable(values: torch.Tensor, mpi: Any) -> list[Any]:
    """Return what mpi4py takes to move contiguous values of shape (elements,), without a copy.

    Args:
        values: Any dtype.
        mpi: The module `mpi4py.MPI`.
    """
    dtype, datatype = _BY_WIDTH[values.element_size()]
    return [values.view(dtype), getattr(mpi, datatype)]


def reducible(values: torch.Tensor, mpi: Any) -> list[Any]:
    """Return what mpi4py takes to reduce values that `to_reducible` made."""
    return [values, getattr(mpi, _REDUCIBLE[values.dtype])]


def to_reducible(values: torch.Tensor) -> torch.Tensor:
    """Return a fresh tensor of a dtype that MPI reduces, and as exact as the given one."""
    return values.to(_STAND_INS.get(values.dtype, values.dtype), copy=True)


def operation(reduction: str, dtype: torch.dtype, mpi: Any) -> Any:
    """Return the MPI operation of `sum`, `max` or `min` for values of a dtype."""
    if dtype == torch.bool and reduction == "sum":
        return mpi.MAX  # torch adds truth values as `or`
    return {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[reduction]
