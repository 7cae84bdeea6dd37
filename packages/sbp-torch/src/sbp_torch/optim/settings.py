"""Check settings of the optimizers `Lamb`, `Lars` and `Lion`; compute the norm of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError

#: Accepted numbers: smallest number, exclusive upper bound, description.
AT_LEAST_ZERO = (0.0, float("inf"), "a finite number >= 0")
FRACTION = (0.0, 1.0, "a number in [0, 1)")


def check_setting(name: str, value: float, accepted: tuple[float, float, str]) -> None:
    """Check a number.

    Raises:
        SbpValueError: the number is out of range, or NaN.
    """
    low, bound, words = accepted
    if not low <= value < bound:
        raise SbpValueError(f"{name}={value!r} is out of range", accepted=words)


def norm(value: Tensor) -> Tensor:
    """Return the Euclidean norm, a 0-d tensor, in float32 or more bits."""
    wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return (wide * wide).sum().sqrt()
