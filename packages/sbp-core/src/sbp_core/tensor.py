"""The type alias `Tensor`, for tensors of any library.

Interfaces of runtimes and boxing backends use it. The core itself only passes tensors on and never
looks into one, so it needs no tensor library; with `sbp-torch` they are `torch.Tensor`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Tensor"]

#: A tensor of whatever library is installed.
Tensor: TypeAlias = Any
