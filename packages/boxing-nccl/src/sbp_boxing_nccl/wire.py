"""What MPI is given of a tensor: its memory, as bytes.

MPI moves bytes and never reduces, so that it needs to know no dtype; sums are `reduce`.
"""

from __future__ import annotations

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
