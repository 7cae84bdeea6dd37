"""What the core calls a tensor.

The contracts of runtimes and boxing backends say where tensors go in and come out. The core itself
hands them on and never looks into one, so that it needs no tensor library; in a process that runs
plans with `sbp-torch` they are `torch.Tensor`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Tensor"]

#: A tensor of whatever library is installed.
Tensor: TypeAlias = Any
