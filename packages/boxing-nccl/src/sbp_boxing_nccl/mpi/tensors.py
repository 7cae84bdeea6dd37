"""Pass the memory of tensors to mpi4py as bytes, and reduce tensors: sum, maximum, minimum.

MPI only moves bytes and never reduces, so it needs no dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

#: dtypes that are summed in float32, and rounded once.
_HALF_PRECISION = (torch.bfloat16, torch.float16)


def memory(values: torch.Tensor, mpi: Any) -> Any:
    """Return the memory of a tensor, for mpi4py; slices of it count in bytes.

    mpi4py could get it through DLPack, but that takes longer than a short message.

    Args:
        values: Contiguous, on the CPU, any dtype. It must live for as long as its memory is used.
        mpi: The module `mpi4py.MPI`.
    """
    return mpi.buffer.fromaddress(values.data_ptr(), values.numel() * values.element_size())


def chunks(values: torch.Tensor, sizes: Sequence[int], mpi: Any) -> list[Any]:
    """Return the memory of consecutive chunks of a tensor; faster than slices of the tensor.

    Args:
        values: See `memory`.
        sizes: Number of elements of each chunk.
        mpi: The module `mpi4py.MPI`.
    """
    at, address, size = mpi.buffer.fromaddress, values.data_ptr(), values.element_size()
    found = []
    for elements in sizes:
        found.append(at(address, size * elements))
        address += size * elements
    return found


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], reduction: str) -> None:
    """Reduce tensors elementwise, from the first to the last.

    Args:
        out: Tensor for the result; may share the memory of one part. If that is not the first part,
            the first part is overwritten.
        parts: Two or more tensors of one shape and dtype; the other parts are unchanged.
        reduction: `sum`, `max` or `min`.
    """
    if len(parts) == 2:
        _REDUCE[reduction](parts[0], parts[1], out=out)
        return
    first, *others = parts
    if reduction == "sum" and out.dtype in _HALF_PRECISION:
        total = first.float()
        for part in others:
            total.add_(part)
        out.copy_(total)
        return
    function = _REDUCE[reduction]
    # A part that is needed later must not be overwritten.
    holds_part = out.data_ptr() in [part.data_ptr() for part in others]
    total = first if holds_part else out
    for part in others[:-1]:
        first = function(first, part, out=total)
    function(first, others[-1], out=out)
