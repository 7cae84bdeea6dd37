"""What MPI is given of a tensor: its memory, as bytes.

MPI moves bytes and never reduces, so that it needs to know no dtype; sums are `reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def memory(values: torch.Tensor, mpi: Any) -> Any:
    """Return the memory of a tensor, for mpi4py; slices of it count in bytes.

    mpi4py could find it by itself, through DLPack, which takes longer than a short message.

    Args:
        values: Contiguous, on the CPU, any dtype. It must live for as long as its memory is used.
        mpi: The module `mpi4py.MPI`.
    """
    return mpi.buffer.fromaddress(values.data_ptr(), values.numel() * values.element_size())


def chunks(values: torch.Tensor, sizes: Sequence[int], mpi: Any) -> list[Any]:
    """Return the memory of consecutive chunks of a tensor; slices of the tensor would take longer.

    Args:
        values: See `memory`.
        sizes: Elements of each chunk.
        mpi: The module `mpi4py.MPI`.
    """
    at, address, size = mpi.buffer.fromaddress, values.data_ptr(), values.element_size()
    found = []
    for elements in sizes:
        found.append(at(address, size * elements))
        address += size * elements
    return found
