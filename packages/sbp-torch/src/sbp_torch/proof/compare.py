"""Whether two values that were computed in double precision are equal but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest difference, of the largest element: sums in another order are off by a millionth of it.
TOLERANCE = 1e-9

#: Largest rest of numbers near one that cancel.
_REST = 1e-14


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if there is none."""
    plain = value.detach().abs()
    finite = plain[plain.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def wide(value: Tensor) -> Tensor:
    """Return a value in double precision."""
    return value.to(torch.complex128 if value.dtype.is_complex else torch.float64)


def off_by(wanted: Tensor, found: Tensor, scale: float = 0.0) -> float:
    """Return how far two values are off each other, of their largest element; 0 if within rounding.

    What is infinite or no number has to be so in both.

    Args:
        wanted: One.
        found: The other.
        scale: What counts as large beside them: elements that come from cancellation are judged by
            what has cancelled. In the units of the values.
    """
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return 0.0 if bool((wanted == found).all()) else float("inf")
    wanted, found = wide(wanted), wide(found)
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (wanted.isfinite() & found.isfinite())).all()):
        return float("inf")
    gap = largest((wanted - found)[~same])
    most = max(largest(wanted), scale)
    if most == 0:  # of what cancels in one, and not quite in the other
        return float("inf") if gap > _REST else 0.0
    return gap / most if gap > TOLERANCE * most else 0.0
