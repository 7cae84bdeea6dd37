"""The exact memory of a plan, and what a session really holds.

`layout` says how results lie, which makes the prediction exact; `meter` counts tensors while a
session runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_torch.memory.meter import MemoryMeter
    from sbp_torch.memory.prediction import predict

__all__ = ["MemoryMeter", "predict"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "MemoryMeter": "meter",
        "predict": "prediction",
    },
)
