"""What a transport is given of a tensor: bytes where it moves values, dtypes that it can reduce."""

from __future__ import annotations

import torch

#: Dtypes that gloo or NCCL cannot reduce, or as torch does not: it adds truth values as `or`.
_IRREDUCIBLE = frozenset({torch.bool, torch.int16})


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return contiguous values of shape (elements,) as uint8 of shape (bytes,), without a copy."""
    # A single element counts as contiguous whatever its stride is; its bytes want stride 1.
    return values.as_strided(values.shape, (1,)).view(torch.uint8)


def reducible(dtype: torch.dtype) -> bool:
    """Say whether the transports reduce a dtype; any other is moved, and reduced here."""
    return dtype not in _IRREDUCIBLE and not dtype.is_complex
